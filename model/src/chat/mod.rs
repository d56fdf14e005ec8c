//! Chat messages to prompt tokens, whole or only what a turn adds.
//!
//! A [`ChatTemplate`] renders messages with the model's Jinja template. [`ChatTemplate::prompt_tokens`] renders a whole
//! conversation, [`ChatTemplate::delta_tokens`] only what comes after the last reply, so that past tokens are never
//! tokenised again, and [`ChatTemplate::rebase_tokens`] renders a conversation anew around the original ids of its
//! replies, for templates that change what they rendered before.
//!
//! Invariants: control tokens come from template text only, never from what clients wrote (`neutral`); BOS stands once,
//! at position 0; a template cannot make rendering panic or run for ever.
//!
//! May depend on `tokenizer` and `detokenizer`. Deliberately absent: sessions, storage, tool definitions.

mod environment;
mod error;
mod json;
mod neutral;
mod reply;
mod stability;

use std::path::Path;

use minijinja::{context, Environment};
use serde::{Deserialize, Serialize};

use crate::tokenizer::{TextPlace, Tokenizer};

pub use error::ChatError;
pub use reply::{close_reply, cut_at_text, ReplyCut, ReplyEnd};
pub use stability::Stability;

/// Used when a model brings no template: ChatML, without a system prompt of its own.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// One message as templates see it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Templates call it `reasoning_content`.
    #[serde(default, rename = "reasoning_content", skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }
}

/// The original ids of one reply, for [`ChatTemplate::rebase_tokens`].
#[derive(Debug, Clone, Copy)]
pub struct Reply<'a> {
    /// Index of the assistant message whose text is replaced.
    pub message: usize,
    /// With the end-of-turn token if the log has it.
    pub ids: &'a [u32],
}

/// A model's chat template.
pub struct ChatTemplate {
    /// As written, for the fingerprint.
    source: String,
    /// As parsed.
    template: String,
    environment: Environment<'static>,
    bos: String,
    eos: String,
    stability: Stability,
    keeps_reasoning: bool,
    /// White space that the template renders before a reply; the log has none but the reply's own.
    reply_gap: String,
}

impl ChatTemplate {
    /// Parses `source` (`None`: [`CHATML`]) and tests whether it is prefix-stable. `bos` and `eos` are the spellings that
    /// the template knows as `bos_token` and `eos_token`, empty without one.
    pub fn new(source: Option<&str>, bos: &str, eos: &str) -> Result<Self, ChatError> {
        let source = source.unwrap_or(CHATML);
        let mut template = Self {
            source: source.to_owned(),
            template: environment::without_generation_tags(source),
            environment: environment::environment(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            stability: Stability::Stable,
            keeps_reasoning: true,
            reply_gap: String::new(),
        };
        template.environment.template_from_str(&template.template).map_err(|e| ChatError::Template(e.to_string()))?;
        template.stability = stability::probe(&template)?;
        template.keeps_reasoning = stability::keeps_reasoning(&template);
        template.reply_gap = stability::reply_gap(&template);
        Ok(template)
    }

    /// [`ChatTemplate::new`] with the tokenizer's BOS and EOS.
    pub fn for_tokenizer(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        let spelling = |id: Option<u32>| {
            let bytes = id.map(|id| tokenizer.token_bytes(id)).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        Self::new(source, &spelling(tokenizer.bos()), &spelling(tokenizer.eos()))
    }

    /// Whether each render begins with the one before it, so that [`ChatTemplate::delta_tokens`] gives the log that a
    /// whole render would give.
    pub fn is_prefix_stable(&self) -> bool {
        self.stability == Stability::Stable
    }

    /// Whether deltas can be appended at all; if not, every turn needs [`ChatTemplate::rebase_tokens`].
    pub fn can_append(&self) -> bool {
        !matches!(self.stability, Stability::Unstable(_))
    }

    /// What the test at construction found.
    pub fn stability(&self) -> &Stability {
        &self.stability
    }

    /// Whether the template shows the model the reasoning of its earlier replies.
    pub fn keeps_reasoning(&self) -> bool {
        self.keeps_reasoning
    }

    /// Changes with the template and its special tokens.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("keepsake chat template 1");
        for part in [&self.source, &self.bos, &self.eos] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// The ids of a whole conversation, BOS once.
    pub fn prompt_tokens(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        self.whole_tokens(tokenizer, messages, &[], add_generation_prompt)
    }

    /// The ids that `new` items add after a reply to `base`, up to and with the generation prompt (design.md section 4,
    /// delta rendering).
    ///
    /// `base` is the last turn's items before the reply, with the system prompt when that turn was the first.
    /// `ends_with_eot`: the log already holds the reply's end-of-turn token, so the delta begins after it.
    pub fn delta_tokens(
        &self,
        tokenizer: &Tokenizer,
        base: &[ChatMessage],
        ends_with_eot: bool,
        new: &[ChatMessage],
    ) -> Result<Vec<u32>, ChatError> {
        let all: Vec<&ChatMessage> = base.iter().chain(new).collect();
        let [marker, sentinel] = self.unused(&all)?;
        let neutral = |items: &[ChatMessage]| -> Vec<ChatMessage> {
            items.iter().map(|m| neutral::neutralise(m, tokenizer, marker)).collect()
        };
        let mut messages = neutral(base);
        let before = self.render(&messages, true)?;
        messages.push(ChatMessage::new("assistant", sentinel));
        messages.extend(neutral(new));
        let after = self.render(&messages, true)?;
        let tail = stability::continue_at(&before, &after, sentinel)?.tail;
        let ids = tokenizer.encode_template(tail, Some(marker), TextPlace::Continuation);
        Ok(if ends_with_eot { without_end_of_turn(tokenizer, ids) } else { ids })
    }

    /// The ids of a whole conversation with a generation prompt, in which the replies keep their original ids.
    ///
    /// `replies` are in the order of their messages. A reply that the template leaves out is left out.
    pub fn rebase_tokens(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        replies: &[Reply<'_>],
    ) -> Result<Vec<u32>, ChatError> {
        self.whole_tokens(tokenizer, messages, replies, true)
    }

    fn whole_tokens(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        replies: &[Reply<'_>],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        let all: Vec<&ChatMessage> = messages.iter().collect();
        let [marker, sentinel] = self.unused(&all)?;
        let mut rendered: Vec<ChatMessage> =
            messages.iter().map(|m| neutral::neutralise(m, tokenizer, marker)).collect();
        for (index, reply) in replies.iter().enumerate() {
            let Some(message) = rendered.get_mut(reply.message) else {
                return Err(ChatError::Render(format!("no message {} for a reply", reply.message)));
            };
            // Numbered by position: sentinels stay distinct without one unused character for each.
            *message = ChatMessage::new(message.role.clone(), format!("{sentinel}{index}{sentinel}"));
        }
        let text = self.render(&rendered, add_generation_prompt)?;
        let mut pieces = text.split(sentinel).peekable();
        let first = pieces.next().unwrap_or("");
        let first = if pieces.peek().is_some() { self.without_gap(first) } else { first };
        let mut ids = tokenizer.encode_template(first, Some(marker), TextPlace::Start);
        let mut num_spliced = 0;
        while let (Some(number), Some(tail)) = (pieces.next(), pieces.next()) {
            let index: usize = number.parse().map_err(|_| ChatError::NotPrefixStable("it changes replies"))?;
            if index < num_spliced {
                return Err(ChatError::NotPrefixStable("it repeats or reorders replies"));
            }
            num_spliced = index + 1;
            let reply = replies[index].ids;
            ids.extend_from_slice(reply);
            let tail = if pieces.peek().is_some() { self.without_gap(tail) } else { tail };
            let tail = tokenizer.encode_template(tail, Some(marker), TextPlace::Continuation);
            let has_eot = reply.last().is_some_and(|id| tokenizer.eog_ids().contains(id));
            ids.extend(if has_eot { without_end_of_turn(tokenizer, tail) } else { tail });
        }
        Ok(with_bos(tokenizer, ids))
    }

    /// Text before a reply as the log has it.
    fn without_gap<'a>(&self, text: &'a str) -> &'a str {
        text.strip_suffix(self.reply_gap.as_str()).unwrap_or(text)
    }

    fn unused<const N: usize>(&self, messages: &[&ChatMessage]) -> Result<[char; N], ChatError> {
        let found = neutral::unused_characters(&self.template, messages, N)?;
        Ok(found.try_into().expect("as many as asked for"))
    }

    fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatError> {
        // Parsed at each use: the environment cannot own a template's source, and parsing takes about as long as
        // rendering.
        let template =
            self.environment.template_from_str(&self.template).map_err(|e| ChatError::Template(e.to_string()))?;
        let values = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
            tools => (),
            documents => (),
        };
        template.render(values).map_err(|e| environment::explain(&e))
    }
}

/// The chat template of a Hugging Face folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`
/// (one template, or a list in which `default` counts).
pub fn template_of_hf_folder(folder: &Path) -> Result<Option<String>, ChatError> {
    let read = |name: &str| {
        let path = folder.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ChatError::Io { path, source }),
        }
    };
    if let Some(source) = read("chat_template.jinja")? {
        return Ok(Some(source));
    }
    let Some(config) = read("tokenizer_config.json")? else {
        return Ok(None);
    };
    let config: serde_json::Value =
        serde_json::from_str(&config).map_err(|e| ChatError::Template(format!("tokenizer_config.json: {e}")))?;
    let template = &config["chat_template"];
    let default = template.as_array().into_iter().flatten().find(|t| t["name"] == "default");
    let source = default.map_or(template, |t| &t["template"]);
    Ok(source.as_str().map(str::to_owned))
}

/// Drops the end-of-turn token that the log already holds, with white space that the template puts before it.
fn without_end_of_turn(tokenizer: &Tokenizer, mut ids: Vec<u32>) -> Vec<u32> {
    let Some(at) = ids.iter().position(|&id| tokenizer.is_special(id)) else {
        return ids;
    };
    let is_blank = tokenizer.decode(&ids[..at], true).trim().is_empty();
    if is_blank && tokenizer.eog_ids().contains(&ids[at]) {
        ids.drain(..=at);
    }
    ids
}

fn with_bos(tokenizer: &Tokenizer, mut ids: Vec<u32>) -> Vec<u32> {
    if let Some(bos) = tokenizer.bos().filter(|_| tokenizer.add_bos()) {
        if ids.first() != Some(&bos) {
            ids.insert(0, bos);
        }
    }
    ids
}
