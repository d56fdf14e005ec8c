//! The Jinja environment that Hugging Face chat templates expect (`transformers/utils/chat_template_utils.py`).

use jiff::Zoned;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json::tojson;
use super::ChatError;

/// Instructions that one render may take: well over any real conversation, some seconds for a template that never ends.
const FUEL: u64 = 50_000_000;

/// Marks errors that come from `raise_exception`.
const RAISED: &str = "raised by the template: ";

pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python_method);
    env.set_fuel(Some(FUEL));
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env
}

/// `{% generation %}` marks the reply for training masks and renders its body: as an `if` that is always true, it keeps
/// the white space control of its tags.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let len = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(len);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}");
        match name.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// What a failed render means for the caller.
pub(super) fn explain(error: &Error) -> ChatError {
    if let Some(message) = error.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        return ChatError::Refused(message.to_owned());
    }
    // The top line; the rest of minijinja's report is source lines of the template.
    ChatError::Render(error.to_string().lines().next().unwrap_or_default().to_owned())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &Zoned::now())
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// Python's methods beyond the ones `minijinja-contrib` has.
fn python_method(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), [affix]) = (value.as_str(), args) {
        let affix = affix.as_str().unwrap_or_default();
        match method {
            "removeprefix" => return Ok(text.strip_prefix(affix).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(affix).unwrap_or(text).into()),
            _ => {}
        }
    }
    unknown_method_callback(state, value, method, args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, ChatError> {
        let env = environment();
        let source = without_generation_tags(source);
        let template = env.template_from_str(&source).unwrap();
        template.render(minijinja::context! { x => vec!["<a>", "é'"] }).map_err(|e| explain(&e))
    }

    #[test]
    fn json_is_pythons() {
        assert_eq!(
            render(r#"{{ {"a": [1, 2.0, none], "b": x} | tojson }}"#).unwrap(),
            r#"{"a": [1, 2.0, null], "b": ["<a>", "é'"]}"#
        );
        assert_eq!(render("{{ {'a': [1]} | tojson(indent=4) }}").unwrap(), "{\n    \"a\": [\n        1\n    ]\n}");
    }

    #[test]
    fn what_templates_use() {
        assert_eq!(render("{% generation %}\nA{% endgeneration %}").unwrap(), "A");
        assert_eq!(render("a {%- generation -%} b {%- endgeneration -%} c").unwrap(), "abc");
        assert_eq!(render("{{ ' a-b '.strip().split('-')[-1].upper() }}{{ 'ab'.removeprefix('a') }}").unwrap(), "Bb");
        assert_eq!(
            render("{% set n = namespace(v=1) %}{% for i in [1, 2] %}{% set n.v = n.v + i %}{% endfor %}{{ n.v }}")
                .unwrap(),
            "4"
        );
        assert_eq!(render("{{ strftime_now('%Y') | length }}{{ nothing }}{{ nothing is defined }}").unwrap(), "4False");
    }

    #[test]
    fn refusals_and_runaways() {
        let refused = render("{{ raise_exception('no system role') }}").unwrap_err();
        assert!(matches!(&refused, ChatError::Refused(m) if m == "no system role"), "{refused}");
        let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}";
        assert!(matches!(render(endless).unwrap_err(), ChatError::Render(_)));
        assert!(matches!(render("{{ nothing.at.all }}").unwrap_err(), ChatError::Render(_)));
        assert!(matches!(render("{{ strftime_now('%') }}").unwrap_err(), ChatError::Render(_)));
    }
}
