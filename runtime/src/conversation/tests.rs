//! Turns put together from their parts: the log that grows turn by turn against one whole render.

use std::sync::Arc;

use keepsake_model::chat::{ChatMessage, ChatTemplate};
use keepsake_model::tokenizer::{GgufVocab, Tokenizer};
use keepsake_tiers::TurnRecord;

use super::*;
use crate::core::FinishCause;
use crate::messages::session::{Prompt, TurnError, TurnUsage};

const END: u32 = 2;

/// One token a byte, and ChatML's two control tokens.
fn tokenizer() -> Arc<Tokenizer> {
    let mut vocab =
        GgufVocab { model: "gpt2".into(), pre: Some("gpt-2".into()), add_bos: Some(false), ..GgufVocab::default() };
    let mut push = |text: String, kind: i32| {
        vocab.tokens.push(text);
        vocab.token_types.push(kind);
    };
    push("<unk>".to_owned(), 1);
    push("<|im_start|>".to_owned(), 3);
    push("<|im_end|>".to_owned(), 3);
    // GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100.
    let is_printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let spelling = if is_printable(byte) { u32::from(byte) } else { next };
        next += u32::from(!is_printable(byte));
        push(char::from_u32(spelling).unwrap().to_string(), 1);
    }
    vocab.eos = Some(END);
    Arc::new(Tokenizer::from_vocab(&vocab).unwrap())
}

fn chatml() -> ChatTemplate {
    ChatTemplate::new(None, "", "<|im_end|>").unwrap()
}

fn user(text: &str) -> Prompt {
    Prompt::Messages(vec![ChatMessage::new("user", text)])
}

/// Plays a reply as the session would, and keeps the turn.
fn close(
    tokenizer: &Arc<Tokenizer>,
    path: &mut Vec<Node>,
    prompt: &PromptTokens,
    instructions: Option<&str>,
    mut reply: Reply,
    cause: FinishCause,
) {
    reply.finish();
    let (finish_reason, end) = reply.end(cause);
    let cut = reply.cut(end);
    let document = TurnDocument {
        kind: prompt.kind,
        parent: None,
        messages: prompt.messages.clone(),
        is_cut: false,
        instructions: instructions.map(str::to_owned),
        text: reply.text().to_owned(),
        num_prompt: prompt.appended.len(),
        ends_with_eot: end.leaves_end_of_turn(),
        finish_reason,
        usage: TurnUsage::default(),
        echo: serde_json::Value::Null,
    };
    if prompt.rebased {
        path.clear();
    }
    let record = TurnRecord {
        id: [path.len() as u8 + 1; 16],
        parent: path.last().map(|n| n.record.id),
        tenant: "t".to_owned(),
        tokens: prompt.appended.iter().copied().chain(reply.log(&cut)).collect(),
        items: serde_json::to_vec(&document).unwrap(),
        created_at: 0,
        fingerprints: [[0; 32]; 3],
        finished: true,
        hidden: false,
    };
    assert_eq!(tokenizer.vocab_size(), 259);
    path.push(Node::from_record(record).unwrap());
}

fn said(tokenizer: &Arc<Tokenizer>, prompt: &PromptTokens, text: &str, stops: &[&str], end: Option<u32>) -> Reply {
    let log: Vec<u32> = prompt.past.iter().chain(&prompt.appended).copied().collect();
    let stops = stops.iter().map(|s| (*s).to_owned()).collect();
    let mut reply = Reply::new(Arc::clone(tokenizer), &log, stops, Vec::new());
    for token in tokenizer.encode(text).into_iter().chain(end) {
        reply.push(token);
    }
    reply
}

fn whole_text(tokenizer: &Tokenizer, prompt: &PromptTokens) -> String {
    let log: Vec<u32> = prompt.past.iter().chain(&prompt.appended).copied().collect();
    tokenizer.decode(&log, false)
}

#[test]
fn three_turns_with_each_ending_give_the_log_of_one_whole_render() {
    let (tokenizer, template) = (tokenizer(), chatml());
    let build_next =
        |path: &[Node], text: &str| build(&tokenizer, &template, path, Some("be brief"), &user(text)).unwrap();
    let mut path = Vec::new();
    let first = build_next(&path, "one");
    let reply = said(&tokenizer, &first, "uno", &[], Some(END));
    close(&tokenizer, &mut path, &first, Some("be brief"), reply, FinishCause::EndToken);
    let second = build_next(&path, "two");
    let reply = said(&tokenizer, &second, "dos", &[], None);
    close(&tokenizer, &mut path, &second, Some("be brief"), reply, FinishCause::Length);
    let third = build_next(&path, "three");
    let reply = said(&tokenizer, &third, "tres STOP more", &["STOP"], None);
    assert_eq!(reply.text(), "tres ");
    close(&tokenizer, &mut path, &third, Some("be brief"), reply, FinishCause::Stopped);
    let fourth = build_next(&path, "four");
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let expected = [
        turn("system", "be brief"),
        turn("user", "one"),
        turn("assistant", "uno"),
        turn("user", "two"),
        turn("assistant", "dos"),
        turn("user", "three"),
        turn("assistant", "tres "),
        turn("user", "four"),
        "<|im_start|>assistant\n".to_owned(),
    ];
    assert_eq!(whole_text(&tokenizer, &fourth), expected.concat());
    assert!(!fourth.rebased);
}

#[test]
fn changed_instructions_make_a_new_root_with_the_same_reply_ids() {
    let (tokenizer, template) = (tokenizer(), chatml());
    let mut path = Vec::new();
    let first = build(&tokenizer, &template, &path, Some("be brief"), &user("one")).unwrap();
    let reply = said(&tokenizer, &first, "uno", &[], Some(END));
    close(&tokenizer, &mut path, &first, Some("be brief"), reply, FinishCause::EndToken);
    for instructions in [None, Some("be long")] {
        let next = build(&tokenizer, &template, &path, instructions, &user("two")).unwrap();
        assert!(next.rebased && next.past.is_empty());
        let text = whole_text(&tokenizer, &next);
        assert!(!text.contains("be brief"));
        assert_eq!(text.contains("be long"), instructions.is_some());
        assert!(text.contains(
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nuno<|im_end|>\n<|im_start|>user\ntwo<|im_end|>"
        ));
        let mut rebased = path.clone();
        let reply = said(&tokenizer, &next, "dos", &[], Some(END));
        close(&tokenizer, &mut rebased, &next, instructions, reply, FinishCause::EndToken);
        assert_eq!(rebased.len(), 1, "the new root stands for the whole conversation");
        let third = build(&tokenizer, &template, &rebased, instructions, &user("three")).unwrap();
        assert!(!third.rebased);
        assert!(whole_text(&tokenizer, &third).contains("assistant\ndos<|im_end|>\n<|im_start|>user\nthree"));
    }
}

#[test]
fn text_that_spells_control_tokens_stays_text() {
    let (tokenizer, template) = (tokenizer(), chatml());
    let prompt = build(&tokenizer, &template, &[], None, &user("a<|im_end|>b")).unwrap();
    assert_eq!(prompt.appended.iter().filter(|t| **t == END).count(), 1);
    assert!(whole_text(&tokenizer, &prompt).contains("a<|im_end|>b"));
}

#[test]
fn raw_turns_append_their_ids_and_refuse_messages() {
    let (tokenizer, template) = (tokenizer(), chatml());
    let mut path = Vec::new();
    let first = build(&tokenizer, &template, &path, None, &Prompt::Tokens(vec![10, 11])).unwrap();
    let reply = said(&tokenizer, &first, "xy", &[], None);
    close(&tokenizer, &mut path, &first, None, reply, FinishCause::Length);
    let next = build(&tokenizer, &template, &path, None, &Prompt::Tokens(vec![12])).unwrap();
    assert_eq!((next.past.len(), next.appended.as_slice()), (4, [12].as_slice()));
    let refused = build(&tokenizer, &template, &path, None, &user("hello"));
    assert!(matches!(refused, Err(TurnError::Conflict(_))));
    let empty = build(&tokenizer, &template, &path, None, &Prompt::Text(String::new()));
    assert!(matches!(empty, Err(TurnError::Invalid { .. })));
}

#[test]
fn a_stop_string_across_tokens_is_never_shown_and_cut_from_the_log() {
    let tokenizer = tokenizer();
    let prompt = build(&tokenizer, &chatml(), &[], None, &user("x")).unwrap();
    let mut reply = Reply::new(Arc::clone(&tokenizer), &prompt.appended, vec!["own fox".to_owned()], Vec::new());
    let mut shown = String::new();
    for token in tokenizer.encode("The quick brown fox jumps") {
        shown.push_str(&reply.push(token).text);
    }
    shown.push_str(&reply.finish());
    assert_eq!(shown, "The quick br");
    let (_, end) = reply.end(FinishCause::Stopped);
    assert_eq!(tokenizer.decode(&reply.log(&reply.cut(end)), false), "The quick br");
}
