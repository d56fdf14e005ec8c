//! Messages of `/v1/chat/completions`, `/tokenize` and `/v1/responses`: roles and text, nothing else in this landing.

use keepsake_model::chat::ChatMessage;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::wrong_type;

/// `messages` of the chat endpoints.
pub(crate) fn messages(value: Value, name: &str) -> Result<Vec<ChatMessage>, ApiError> {
    let Value::Array(items) = value else {
        return Err(wrong_type(name, "an array of messages", &value));
    };
    if items.is_empty() {
        return Err(ApiError::invalid(name, format!("{name} must hold at least one message")));
    }
    let each = items.into_iter().enumerate().map(|(i, item)| message(item, &format!("{name}[{i}]")));
    each.collect()
}

/// `input` of `/v1/responses`: one user message as a string, or a list of message items.
pub(crate) fn response_input(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid("input", "input must not be empty")),
        Value::String(text) => Ok(vec![chat_message("user", text)]),
        items @ Value::Array(_) => messages(items, "input"),
        other => Err(wrong_type("input", "a string or an array of items", &other)),
    }
}

fn message(value: Value, name: &str) -> Result<ChatMessage, ApiError> {
    let Value::Object(mut fields) = value else {
        return Err(wrong_type(name, "an object", &value));
    };
    match fields.get("type") {
        None | Some(Value::Null) => {}
        Some(Value::String(kind)) if kind == "message" => {}
        Some(_) => {
            let message = format!("{name}.type: only items of type \"message\" are supported");
            return Err(ApiError::unsupported(&format!("{name}.type"), message));
        }
    }
    for refused in ["tool_calls", "function_call", "tool_call_id", "audio"] {
        if fields.get(refused).is_some_and(|value| !is_empty(value)) {
            let param = format!("{name}.{refused}");
            return Err(ApiError::unsupported(&param, format!("{param}: tools and audio are not supported")));
        }
    }
    let role = role(&fields, name)?;
    let content = content(fields.remove("content").unwrap_or(Value::Null), &format!("{name}.content"))?;
    Ok(chat_message(role, content))
}

fn role(fields: &Map<String, Value>, name: &str) -> Result<&'static str, ApiError> {
    let param = format!("{name}.role");
    match fields.get("role").and_then(Value::as_str) {
        Some("user") => Ok("user"),
        Some("assistant") => Ok("assistant"),
        // Templates know one word for what the operator or developer says.
        Some("system" | "developer") => Ok("system"),
        Some("tool" | "function") => Err(ApiError::unsupported(&param, format!("{param}: tools are not supported"))),
        _ => Err(ApiError::invalid(&param, format!("{param} must be one of system, developer, user, assistant"))),
    }
}

/// A string, or text parts joined by newlines as vLLM joins them.
fn content(value: Value, name: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong_type(name, "a string or an array of text parts", &other)),
    };
    let texts = parts.into_iter().enumerate().map(|(i, part)| text_part(part, &format!("{name}[{i}]")));
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn text_part(value: Value, name: &str) -> Result<String, ApiError> {
    let Value::Object(mut part) = value else {
        return Err(wrong_type(name, "an object", &value));
    };
    match part.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => {}
        _ => {
            let param = format!("{name}.type");
            let message =
                format!("{param} must be text, input_text or output_text; images, audio and files are not supported");
            return Err(ApiError::unsupported(&param, message));
        }
    }
    match part.remove("text") {
        Some(Value::String(text)) => Ok(text),
        other => Err(wrong_type(&format!("{name}.text"), "a string", &other.unwrap_or(Value::Null))),
    }
}

fn chat_message(role: &str, content: String) -> ChatMessage {
    ChatMessage::new(role, content)
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn strings_parts_and_roles() {
        let input = json!([
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        ]);
        let messages = response_input(input).expect("valid input");
        let pairs: Vec<_> = messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        assert_eq!(pairs, [("system", "be brief"), ("user", "a\nb"), ("assistant", "c")]);
    }

    #[test]
    fn what_is_not_text_is_refused_by_name() {
        let table = [
            (json!([{"type": "function_call", "name": "f"}]), "input[0].type"),
            (json!([{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]), "input[1].role"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
                "input[0].content[0].type",
            ),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "input[0].content[0].text"),
            (json!([{"role": "assistant", "content": "", "tool_calls": [{}]}]), "input[0].tool_calls"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": 1, "content": "x"}]), "input[0].role"),
            (json!(["x"]), "input[0]"),
            (json!([]), "input"),
            (json!(""), "input"),
        ];
        for (input, param) in table {
            let error = response_input(input.clone()).expect_err("refused").body();
            assert_eq!(error["error"]["param"], param, "{input}");
        }
    }
}
