//! Incremental detokenisation and stop strings.

mod support;

use std::sync::Arc;

use keepsake_model::detokenizer::Detokenizer;
use keepsake_model::stop::StopMatcher;
use keepsake_model::tokenizer::Tokenizer;
use proptest::prelude::*;
use support::{demo_tokenizer, sentence_piece_vocab};

fn stream(tokenizer: &Arc<Tokenizer>, prompt_tail: &[u32], ids: &[u32]) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), prompt_tail);
    let pushed = ids.iter().map(|&id| detokenizer.push(id)).collect();
    (pushed, detokenizer.finish())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn pushes_add_up_to_decode(ids in prop::collection::vec(0u32..49_160, 0..40)) {
        let tokenizer = demo_tokenizer();
        let (pushed, rest) = stream(&tokenizer, &[], &ids);
        prop_assert_eq!(pushed.concat() + &rest, tokenizer.decode(&ids, true));
    }

    #[test]
    fn pushes_add_up_to_decode_of_sentence_pieces(ids in prop::collection::vec(0u32..306, 0..40)) {
        let tokenizer = Arc::new(Tokenizer::from_vocab(&sentence_piece_vocab()).unwrap());
        let (pushed, rest) = stream(&tokenizer, &[1], &ids);
        prop_assert_eq!(pushed.concat() + &rest, tokenizer.decode(&ids, true));
    }

    #[test]
    fn whole_text_comes_whole(text in "(\\PC|😀|é|東){0,30}") {
        let tokenizer = demo_tokenizer();
        let (pushed, rest) = stream(&tokenizer, &[], &tokenizer.encode(&text));
        prop_assert_eq!((pushed.concat(), rest), (text, String::new()));
    }

    #[test]
    fn stop_strings_cut_as_if_the_text_were_whole(
        text in "[ab<|]{0,40}",
        stops in prop::collection::vec("[ab<|]{1,4}", 0..4),
        cuts in prop::collection::vec(0usize..40, 0..12),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(text.len())).chain([0, text.len()]).collect();
        cuts.sort_unstable();
        let mut matcher = StopMatcher::new(stops.clone());
        let (mut emitted, mut stopped) = (String::new(), false);
        for ends in cuts.windows(2) {
            let step = matcher.push(&text[ends[0]..ends[1]]);
            emitted.push_str(&step.text);
            stopped |= step.stopped;
            // What was shown can never turn out to be the beginning of a stop string that the text completes.
            let naive = naive_cut(&text, &stops);
            prop_assert!(emitted.len() <= naive.unwrap_or(text.len()));
        }
        if !stopped {
            emitted.push_str(&matcher.finish());
        }
        let naive = naive_cut(&text, &stops);
        prop_assert_eq!(stopped, naive.is_some());
        prop_assert_eq!(emitted.as_str(), &text[..naive.unwrap_or(text.len())]);
        prop_assert!(stops.iter().all(|stop| !emitted.contains(stop.as_str())));
    }
}

/// Where the text ends by looking at all of it: before the longest of the stop strings that complete first.
fn naive_cut(text: &str, stops: &[String]) -> Option<usize> {
    (1..=text.len()).find_map(|end| {
        let complete = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        complete.map(|stop| end - stop.len()).min()
    })
}

#[test]
fn a_prompt_that_ends_inside_of_a_character_does_not_leak() {
    let tokenizer = demo_tokenizer();
    let ids = tokenizer.encode("long prompt 京");
    let split = (1..ids.len())
        .find(|&at| tokenizer.decode(&ids[..at], true).ends_with('\u{FFFD}'))
        .expect("the character takes several tokens");
    let (prompt, reply) = ids.split_at(split);
    // Completed by the reply: the character is the reply's first. Not completed: nothing of the prompt shows.
    let (pushed, rest) = stream(&tokenizer, prompt, reply);
    assert_eq!(pushed.concat() + &rest, "京");
    let hello = tokenizer.encode("Hello");
    let (pushed, rest) = stream(&tokenizer, prompt, &hello);
    assert_eq!(pushed.concat() + &rest, "Hello");
    let (pushed, rest) = stream(&tokenizer, prompt, &[2]);
    assert_eq!(pushed.concat() + &rest, "");
}

#[test]
fn sentence_piece_space_rules() {
    let tokenizer = Arc::new(Tokenizer::from_vocab(&sentence_piece_vocab()).unwrap());
    let the = tokenizer.encode("the");
    let text = |tail: &[u32]| {
        let (pushed, rest) = stream(&tokenizer, tail, &the);
        pushed.concat() + &rest
    };
    assert_eq!(text(&[]), "the");
    assert_eq!(text(&[1]), "the", "after a special token");
    assert_eq!(text(&the), " the", "going on in a text");
}

#[test]
fn stop_string_over_token_boundaries() {
    let mut matcher = StopMatcher::new(["own fox".to_owned(), String::new()]);
    let steps: Vec<_> = ["The quick br", "own", " f", "ox", " jumps"].map(|t| matcher.push(t)).into();
    let text: String = steps.iter().map(|s| s.text.as_str()).collect();
    assert_eq!(text, "The quick br");
    assert_eq!(steps.iter().map(|s| s.stopped).collect::<Vec<_>>(), [false, false, false, true, true]);
    let mut matcher = StopMatcher::new(["é!".to_owned()]);
    assert_eq!(matcher.push("caf").text, "caf");
    assert_eq!(matcher.push("é").text, "");
    assert_eq!(matcher.push("?").text, "é?");
    assert_eq!(matcher.finish(), "");
}
