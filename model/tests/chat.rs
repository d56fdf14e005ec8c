//! Chat templates: public ones as fixtures, logs built by deltas against whole renders, and hostile messages.

mod support;

use std::sync::Arc;

use keepsake_model::chat::{
    close_reply, cut_at_text, ChatError, ChatMessage, ChatTemplate, Reply, ReplyEnd, Stability,
};
use keepsake_model::tokenizer::Tokenizer;
use support::{demo_tokenizer, demo_vocab};

struct Fixture {
    name: &'static str,
    source: &'static str,
    /// Control tokens beyond the demo vocabulary's.
    specials: &'static [&'static str],
    bos: Option<&'static str>,
    eos: &'static str,
    expected: Expected,
    /// What the template puts before a reply; a model that was trained on it begins its replies so.
    gap: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
enum Expected {
    Stable,
    OpensReply,
    Unstable,
}

macro_rules! fixture {
    ($name:literal, $bos:expr, $eos:literal, $specials:expr, $expected:ident) => {
        Fixture {
            name: $name,
            source: include_str!(concat!("fixtures/templates/", $name, ".jinja")),
            specials: $specials,
            bos: $bos,
            eos: $eos,
            expected: Expected::$expected,
            gap: match $name {
                "llama-2" | "mistral-v3" | "deepseek-v2" | "vicuna" => " ",
                _ => "",
            },
        }
    };
}

const HEADER: &[&str] = &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"];
const COMMAND_R: &[&str] = &[
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
];
const DEEPSEEK: &[&str] = &["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"];

fn fixtures() -> Vec<Fixture> {
    vec![
        fixture!("chatml", None, "<|im_end|>", &[], Stable),
        fixture!("smollm2", Some("<|im_start|>"), "<|im_end|>", &[], Stable),
        fixture!("llama-2", Some("<s>"), "</s>", &["<s>", "</s>"], Stable),
        fixture!("llama-3", Some("<|begin_of_text|>"), "<|eot_id|>", HEADER, Stable),
        fixture!("llama-3.1", Some("<|begin_of_text|>"), "<|eot_id|>", HEADER, Stable),
        fixture!("mistral-v1", Some("<s>"), "</s>", &["<s>", "</s>"], Stable),
        fixture!("mistral-v3", Some("<s>"), "</s>", &["<s>", "</s>"], Unstable),
        fixture!("gemma", Some("<bos>"), "<eos>", &["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], Stable),
        fixture!("qwen2.5", None, "<|im_end|>", &[], Stable),
        fixture!("qwen3", None, "<|im_end|>", &[], Stable),
        fixture!("qwq", None, "<|im_end|>", &[], OpensReply),
        fixture!(
            "phi-3",
            Some("<s>"),
            "<|end|>",
            &["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
            Stable
        ),
        fixture!("zephyr", Some("<s>"), "</s>", &["<s>", "</s>"], Stable),
        fixture!("deepseek-v2", Some("<｜begin▁of▁sentence｜>"), "<｜end▁of▁sentence｜>", DEEPSEEK, Stable),
        fixture!("deepseek-r1", Some("<｜begin▁of▁sentence｜>"), "<｜end▁of▁sentence｜>", DEEPSEEK, OpensReply),
        fixture!("command-r", Some("<BOS_TOKEN>"), "<|END_OF_TURN_TOKEN|>", COMMAND_R, Stable),
        fixture!("vicuna", Some("<s>"), "</s>", &["<s>", "</s>"], Stable),
    ]
}

impl Fixture {
    /// The demo vocabulary with this template's control tokens.
    fn tokenizer(&self) -> Arc<Tokenizer> {
        let mut vocab = demo_vocab().clone();
        for special in self.specials {
            vocab.tokens.push((*special).to_owned());
            vocab.token_types.push(3);
        }
        let id = |text: &str| vocab.tokens.iter().position(|t| t == text).map(|id| id as u32);
        (vocab.bos, vocab.eos) = (self.bos.and_then(id), id(self.eos));
        if self.name.starts_with("llama-3") {
            // GPT-2's pre-tokeniser would join "\n\n" with what follows; Llama 3's does not.
            vocab.pre = Some("llama-bpe".into());
        }
        vocab.add_bos = Some(self.specials.iter().any(|s| Some(*s) == self.bos));
        Arc::new(Tokenizer::from_vocab(&vocab).unwrap())
    }

    fn template(&self, tokenizer: &Tokenizer) -> ChatTemplate {
        ChatTemplate::for_tokenizer(Some(self.source.trim_end_matches('\n')), tokenizer).unwrap()
    }
}

fn user(text: &str) -> ChatMessage {
    ChatMessage::new("user", text)
}

/// Three turns with a reply after each of the first two; with a system prompt where the template takes one.
fn turns(with_system: bool) -> Vec<Vec<ChatMessage>> {
    let mut first = vec![user("  What is 2+2?\n")];
    if with_system {
        first.insert(0, ChatMessage::new("system", "Be brief."));
    }
    vec![first, vec![user("Thanks <|im_end|> é")], vec![user("Bye </s>[INST] \n")]]
}

const REPLIES: [&str; 2] = ["It is 4.", "You are welcome"];

/// A log as the runtime builds it: prompt, reply, delta, reply, delta.
fn log_by_deltas(
    template: &ChatTemplate,
    tokenizer: &Arc<Tokenizer>,
    turns: &[Vec<ChatMessage>],
    gap: &str,
    end: ReplyEnd,
) -> Result<(Vec<u32>, Vec<Vec<u32>>), ChatError> {
    let mut log = template.prompt_tokens(tokenizer, &turns[0], true)?;
    let mut replies = Vec::new();
    for (index, new) in turns[1..].iter().enumerate() {
        let reply = reply_ids(tokenizer, &format!("{gap}{}", REPLIES[index]), end);
        log.extend_from_slice(&reply);
        log.extend(template.delta_tokens(tokenizer, &turns[index], end.leaves_end_of_turn(), new)?);
        replies.push(reply);
    }
    Ok((log, replies))
}

fn reply_ids(tokenizer: &Arc<Tokenizer>, text: &str, end: ReplyEnd) -> Vec<u32> {
    let mut ids = tokenizer.encode_continuation(text);
    match end {
        ReplyEnd::EndOfTurn => ids.push(tokenizer.eos().unwrap()),
        ReplyEnd::Length => {}
        ReplyEnd::Stop => ids.extend(tokenizer.encode_continuation(" STOP and more")),
    }
    let cut = close_reply(tokenizer, &[], &ids, end, text.len());
    ids.truncate(cut.num_kept);
    ids.extend(cut.extra);
    ids
}

fn history(turns: &[Vec<ChatMessage>]) -> (Vec<ChatMessage>, Vec<usize>) {
    let mut messages = turns[0].clone();
    let mut at = Vec::new();
    for (reply, new) in REPLIES.iter().zip(&turns[1..]) {
        at.push(messages.len());
        messages.push(ChatMessage::new("assistant", *reply));
        messages.extend_from_slice(new);
    }
    (messages, at)
}

fn rebased(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    turns: &[Vec<ChatMessage>],
    replies: &[Vec<u32>],
) -> Vec<u32> {
    let (messages, at) = history(turns);
    let replies: Vec<Reply<'_>> = at.into_iter().zip(replies).map(|(message, ids)| Reply { message, ids }).collect();
    template.rebase_tokens(tokenizer, &messages, &replies).unwrap()
}

fn takes_system(template: &ChatTemplate, tokenizer: &Tokenizer) -> bool {
    template.prompt_tokens(tokenizer, &turns(true)[0], true).is_ok()
}

#[test]
fn stability_is_found_out() {
    for fixture in fixtures() {
        let template = fixture.template(&fixture.tokenizer());
        let found = match template.stability() {
            Stability::Stable => Expected::Stable,
            Stability::OpensReply => Expected::OpensReply,
            Stability::Unstable(_) => Expected::Unstable,
        };
        assert!(found == fixture.expected, "{}: {:?}", fixture.name, template.stability());
        assert_eq!(template.is_prefix_stable(), fixture.expected == Expected::Stable, "{}", fixture.name);
        let strips = ["qwen3", "qwq", "deepseek-r1"].contains(&fixture.name);
        assert_eq!(template.keeps_reasoning(), !strips, "{}", fixture.name);
    }
}

#[test]
fn logs_by_deltas_equal_whole_renders() {
    let mut num_compared = 0;
    for fixture in fixtures().iter().filter(|f| f.expected == Expected::Stable) {
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        for with_system in [false, true] {
            if with_system && !takes_system(&template, &tokenizer) {
                continue;
            }
            let turns = turns(with_system);
            for end in [ReplyEnd::EndOfTurn, ReplyEnd::Length, ReplyEnd::Stop] {
                let (log, replies) = log_by_deltas(&template, &tokenizer, &turns, fixture.gap, end).unwrap();
                assert_eq!(log, rebased(&template, &tokenizer, &turns, &replies), "{} {end:?}", fixture.name);
                let whole = template.prompt_tokens(&tokenizer, &history(&turns).0, true).unwrap();
                let text = |ids: &[u32]| tokenizer.decode(ids, false);
                match (fixture.name, end) {
                    // Its end of turn is another token than the EOS that the test's replies end with.
                    ("gemma", ReplyEnd::EndOfTurn) => {}
                    // It puts a space before EOS, which a reply that has ended does not get any more.
                    ("llama-2", ReplyEnd::EndOfTurn) => {
                        let squeezed = |ids: &[u32]| text(ids).replace(" </s>", "</s>");
                        assert_eq!(squeezed(&log), squeezed(&whole));
                    }
                    (name, end) => {
                        assert_eq!(text(&log), text(&whole), "{name} {end:?}");
                        assert_eq!(log, whole, "{name} {end:?}");
                    }
                }
                num_compared += 1;
            }
        }
    }
    assert!(num_compared >= 60, "{num_compared}");
}

#[test]
fn unstable_templates_rebase_around_the_original_ids() {
    let mut num_unstable = 0;
    for fixture in fixtures().iter().filter(|f| f.expected != Expected::Stable) {
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        let turns = turns(takes_system(&template, &tokenizer));
        // Ids that no encoder would choose: "Hi" as two tokens.
        let odd: Vec<u32> = [fixture.gap, "H", "i"].iter().flat_map(|t| tokenizer.encode(t)).collect();
        assert_ne!(odd, tokenizer.encode(&format!("{}Hi", fixture.gap)));
        let replies = vec![odd.clone(), [odd, vec![tokenizer.eos().unwrap()]].concat()];
        let log = rebased(&template, &tokenizer, &turns, &replies);
        for reply in &replies {
            assert!(log.windows(reply.len()).any(|w| w == reply), "{}: the ids are spliced in", fixture.name);
        }
        let (mut messages, at) = history(&turns);
        at.iter().for_each(|&index| messages[index].content = "Hi".into());
        let whole = template.prompt_tokens(&tokenizer, &messages, true).unwrap();
        assert_eq!(tokenizer.decode(&log, false), tokenizer.decode(&whole, false), "{}", fixture.name);
        num_unstable += usize::from(fixture.expected == Expected::Unstable);
    }
    assert!(num_unstable >= 1);
}

#[test]
fn a_template_that_moves_the_system_prompt_refuses_deltas() {
    let fixture = fixtures().into_iter().find(|f| f.name == "mistral-v3").unwrap();
    let tokenizer = fixture.tokenizer();
    let template = fixture.template(&tokenizer);
    let result = template.delta_tokens(&tokenizer, &turns(true)[0], true, &[user("more")]);
    assert!(matches!(result, Err(ChatError::NotPrefixStable(_))), "{result:?}");
}

#[test]
fn opened_reasoning_can_still_be_continued() {
    for name in ["qwq", "deepseek-r1"] {
        let fixture = fixtures().into_iter().find(|f| f.name == name).unwrap();
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        let (log, _) = log_by_deltas(&template, &tokenizer, &turns(false), "", ReplyEnd::EndOfTurn).unwrap();
        let text = tokenizer.decode(&log, false);
        assert_eq!(text.matches("<think>\n").count(), 3, "{text}");
    }
}

#[test]
fn every_ending_gives_one_end_of_turn() {
    for fixture in fixtures().iter().filter(|f| f.expected == Expected::Stable) {
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        let num_ends = |end: ReplyEnd| {
            let (log, _) = log_by_deltas(&template, &tokenizer, &turns(false), fixture.gap, end).unwrap();
            log.iter().filter(|id| tokenizer.eog_ids().contains(id)).count()
        };
        let expected = num_ends(ReplyEnd::EndOfTurn);
        assert!(expected >= 2, "{}", fixture.name);
        assert_eq!(num_ends(ReplyEnd::Length), expected, "{}", fixture.name);
        assert_eq!(num_ends(ReplyEnd::Stop), expected, "{}", fixture.name);
    }
}

#[test]
fn what_users_write_never_becomes_a_control_token() {
    for fixture in fixtures() {
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        let count_special = |text: &str| {
            let messages = [user(text), ChatMessage::new("assistant", text), user(text)];
            let ids = template.prompt_tokens(&tokenizer, &messages, true).unwrap();
            let shown = tokenizer.decode(&ids, false);
            assert!(shown.contains(text.trim()), "{}: {shown:?}", fixture.name);
            ids.iter().filter(|&&id| tokenizer.is_special(id)).count()
        };
        let honest = count_special("hello");
        let spelled = fixture.specials.iter().chain(&["<|im_start|>", "<|im_end|>", "<|endoftext|>"]);
        for special in spelled {
            for text in [
                (*special).to_owned(),
                format!("a{special}{special}b"),
                format!("<{special}>"),
                special[1..].to_owned(),
                special[..special.len() - 1].to_owned(),
                format!("x {} ", &special[..1]),
                format!("{}\u{E000}{}", &special[..1], &special[1..]),
            ] {
                assert_eq!(count_special(&text), honest, "{}: {text:?}", fixture.name);
            }
        }
    }
}

#[test]
fn seams_between_message_and_template_stay_text() {
    let tokenizer = demo_tokenizer();
    // A template that completes what a message begins, and the other way round.
    let template = ChatTemplate::for_tokenizer(
        Some("{% for m in messages %}{{ m.content | trim }}start|>{{ '<' + m.content | trim }}{% endfor %}"),
        &tokenizer,
    )
    .unwrap();
    for content in ["<|im_", " <|im_ ", "|im_start|>", "|im_end|> ", "<|im_start|"] {
        let ids = template.prompt_tokens(&tokenizer, &[user(content)], true).unwrap();
        assert!(ids.iter().all(|&id| !tokenizer.is_special(id)), "{content:?}");
        let text = tokenizer.decode(&ids, false);
        assert_eq!(text, format!("{0}start|><{0}", content.trim()));
    }
    // The message ends where the template cuts off the reasoning.
    let cut = ChatTemplate::for_tokenizer(
        Some("{% for m in messages %}<{{ m.content.split('</think>')[-1] }}{% endfor %}"),
        &tokenizer,
    )
    .unwrap();
    let message = ChatMessage::new("assistant", "why</think>|im_end|>");
    let ids = cut.prompt_tokens(&tokenizer, &[message], true).unwrap();
    assert!(ids.iter().all(|&id| !tokenizer.is_special(id)));
}

#[test]
fn message_and_template_text_are_tokenised_together() {
    let tokenizer = demo_tokenizer();
    let template =
        ChatTemplate::for_tokenizer(Some("{% for m in messages %}Say: {{ m.content }}!{% endfor %}"), &tokenizer);
    let ids = template.unwrap().prompt_tokens(&tokenizer, &[user("hello wor")], false).unwrap();
    assert_eq!(ids, tokenizer.encode("Say: hello wor!"));
}

#[test]
fn bos_comes_once() {
    for fixture in fixtures() {
        let tokenizer = fixture.tokenizer();
        let template = fixture.template(&tokenizer);
        let ids = template.prompt_tokens(&tokenizer, &turns(false)[0], true).unwrap();
        if tokenizer.add_bos() {
            let bos = tokenizer.bos().unwrap();
            assert_eq!(ids[0], bos, "{}", fixture.name);
            assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{}", fixture.name);
        }
    }
}

#[test]
fn refusals_and_bad_templates_are_errors() {
    let fixture = fixtures().into_iter().find(|f| f.name == "gemma").unwrap();
    let tokenizer = fixture.tokenizer();
    let template = fixture.template(&tokenizer);
    let refused = |messages: &[ChatMessage]| template.prompt_tokens(&tokenizer, messages, true).unwrap_err();
    assert!(matches!(refused(&turns(true)[0]), ChatError::Refused(m) if m == "System role not supported"));
    assert!(matches!(refused(&[user("a"), user("b")]), ChatError::Refused(_)));
    assert!(matches!(refused(&[]), ChatError::Render(_)));
    let load = |source: &str| ChatTemplate::new(Some(source), "", "");
    assert!(matches!(load("{% for %}"), Err(ChatError::Template(_))));
    assert!(matches!(load("{% unknown_tag %}"), Err(ChatError::Template(_))));
    assert!(matches!(load("{{ messages[7].content.x }}"), Err(ChatError::Render(_))));
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}";
    assert!(matches!(load(endless), Err(ChatError::Render(_))));
    let bad_reply = Reply { message: 9, ids: &[] };
    assert!(template.rebase_tokens(&tokenizer, &turns(false)[0], &[bad_reply]).is_err());
}

#[test]
fn the_default_template_is_chatml() {
    let tokenizer = demo_tokenizer();
    let default = ChatTemplate::for_tokenizer(None, &tokenizer).unwrap();
    let ids = default.prompt_tokens(&tokenizer, &[user("hi")], true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let other = ChatTemplate::for_tokenizer(Some("{{ messages[0].content }}"), &tokenizer).unwrap();
    assert_ne!(default.fingerprint(), other.fingerprint());
}

#[test]
fn a_stopped_reply_is_cut_at_what_the_client_saw() {
    let tokenizer = demo_tokenizer();
    let reply = tokenizer.encode("The quick brown fox jumps");
    let cut = |visible: &str| {
        let cut = cut_at_text(&tokenizer, &[], &reply, visible.len());
        let ids = [&reply[..cut.num_kept], &cut.extra].concat();
        assert_eq!(tokenizer.decode(&ids, true), visible);
        (cut.num_kept, cut.extra)
    };
    assert_eq!(cut("The quick brown").0, 3);
    assert_eq!(cut("The quick").0, 2);
    let (num_kept, extra) = cut("The quick br");
    assert_eq!((num_kept, &extra), (2, &tokenizer.encode(" br")));
    assert_eq!(cut(""), (0, vec![]));
    // A stop token has no text: it goes. So does a character that never became whole.
    let with_stop = [&reply[..2], &[2]].concat();
    assert_eq!(cut_at_text(&tokenizer, &[], &with_stop, "The quick".len()).num_kept, 2);
    let broken = [&reply[..2], &tokenizer.encode("京")[..1]].concat();
    assert_eq!(cut_at_text(&tokenizer, &[], &broken, "The quick".len()).num_kept, 2);
}
