//! The sampler against a slow reference, and its distribution under fixed seeds.

use keepsake_model::sampler::{SamplerState, SamplingParams};
use proptest::prelude::*;

/// The distribution by definition: every step sorts and normalises the whole vocabulary.
fn reference(params: &SamplingParams, prompt: &[u32], output: &[u32], eog: &[u32], logits: &[f32]) -> Vec<f64> {
    let mut logits: Vec<f64> =
        logits.iter().map(|&l| if l.is_nan() { f64::NEG_INFINITY } else { f64::from(l) }).collect();
    for &(id, bias) in &params.logit_bias {
        logits[id as usize] += f64::from(bias);
    }
    if output.len() < params.min_tokens as usize {
        for &id in eog.iter().chain(&params.stop_token_ids) {
            logits[id as usize] = f64::NEG_INFINITY;
        }
    }
    for (id, logit) in logits.iter_mut().enumerate() {
        let id = id as u32;
        let penalty = f64::from(params.repetition_penalty);
        if prompt.contains(&id) || output.contains(&id) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        let count = output.iter().filter(|&&o| o == id).count();
        *logit -= f64::from(params.frequency_penalty) * count as f64;
        *logit -= if count > 0 { f64::from(params.presence_penalty) } else { 0.0 };
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut weights = vec![0.0; logits.len()];
    if params.temperature == 0.0 {
        weights[order[0]] = 1.0;
        return weights;
    }
    let max = logits[order[0]];
    let weight = |id: usize| ((logits[id] - max) / f64::from(params.temperature)).exp();
    order.retain(|&id| weight(id) >= f64::from(params.min_p) && weight(id) > 0.0);
    if let Some(k) = params.top_k.filter(|&k| k > 0) {
        order.truncate(k as usize);
    }
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut sum = 0.0;
    for id in order {
        if sum >= total * f64::from(params.top_p) && params.top_p < 1.0 {
            break;
        }
        sum += weight(id);
        weights[id] = weight(id);
    }
    weights.iter().map(|w| w / sum).collect()
}

/// How often each token comes over many positions, with a fresh state for each.
fn histogram(params: &SamplingParams, prompt: &[u32], logits: &[f32], draws: usize) -> Vec<f64> {
    let mut counts = vec![0.0; logits.len()];
    for position in 0..draws {
        let mut state = SamplerState::new(params.clone(), prompt, &[]);
        counts[state.sample(&mut logits.to_vec(), position) as usize] += 1.0 / draws as f64;
    }
    counts
}

fn params() -> SamplingParams {
    SamplingParams::default()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn only_what_the_reference_allows_and_greedy_is_equal(
        logits in prop::collection::vec(prop_oneof![9 => -8.0f32..8.0, 1 => Just(f32::NAN), 1 => Just(2.0)], 300),
        temperature in prop_oneof![Just(0.0f32), 0.2f32..2.0],
        top_k in prop::option::of(0u32..40),
        top_p in prop_oneof![Just(1.0f32), 0.1f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
        repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
        frequency_penalty in -2.0f32..2.0,
        presence_penalty in -2.0f32..2.0,
        min_tokens in 0u32..4,
        seed in any::<u64>(),
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, min_tokens, seed,
            logit_bias: vec![(5, 3.0), (6, -100.0), (100_000, 1.0)],
            stop_token_ids: vec![9],
            ..SamplingParams::default()
        };
        let in_range = SamplingParams { logit_bias: vec![(5, 3.0), (6, -100.0)], ..params.clone() };
        prop_assert!(params.validate().is_ok());
        let (prompt, eog) = ([1, 2, 5, 5, 77], [0, 3]);
        let mut state = SamplerState::new(params.clone(), &prompt, &eog);
        let mut output = Vec::new();
        for step in 0..6 {
            let allowed = reference(&in_range, &prompt, &output, &eog, &logits);
            let id = state.sample(&mut logits.clone(), prompt.len() + step);
            // Rounding of f32 against f64 decides who is in at the edge of a cut; such a token is at an edge.
            let edge = allowed.iter().copied().filter(|&p| p > 0.0).fold(1.0, f64::min);
            let near_edge = reference(
                &SamplingParams { top_p: (top_p * 1.0001).min(1.0), min_p: min_p * 0.9999, ..in_range.clone() },
                &prompt, &output, &eog, &logits,
            );
            prop_assert!(allowed[id as usize] > 0.0 || near_edge[id as usize] > 0.0, "{} at step {}, edge {}", id, step, edge);
            output.push(id);
        }
    }
}

#[test]
fn frequencies_follow_the_reference() {
    let logits: Vec<f32> = (0..200).map(|i| ((i * 37) % 200) as f32 / 40.0).collect();
    let cases = [
        SamplingParams { seed: 1, ..params() },
        SamplingParams { seed: 2, temperature: 0.5, ..params() },
        SamplingParams { seed: 3, top_k: Some(5), ..params() },
        SamplingParams { seed: 4, top_p: 0.3, ..params() },
        SamplingParams { seed: 5, min_p: 0.6, ..params() },
        SamplingParams { seed: 6, top_k: Some(20), top_p: 0.7, temperature: 1.3, ..params() },
        SamplingParams { seed: 7, repetition_penalty: 1.8, top_k: Some(8), ..params() },
    ];
    let draws = 40_000;
    for case in cases {
        let prompt: Vec<u32> = (150..200).collect();
        let expected = reference(&case, &prompt, &[], &[], &logits);
        let found = histogram(&case, &prompt, &logits, draws);
        for (id, (p, f)) in expected.iter().zip(&found).enumerate() {
            let sigma = (p * (1.0 - p) / draws as f64).sqrt();
            assert!((p - f).abs() <= 5.0 * sigma + 1e-9, "token {id}: {f} for {p} with {case:?}");
        }
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32).collect();
    let run = |seed: u64, from: usize| -> Vec<u32> {
        let mut state = SamplerState::new(SamplingParams { seed, ..params() }, &[], &[]);
        (from..30).map(|position| state.sample(&mut logits.clone(), position)).collect()
    };
    assert_eq!(run(7, 0), run(7, 0));
    assert_eq!(run(7, 0)[12..], run(7, 12), "a restarted reply goes on with the same tokens");
    assert_ne!(run(7, 0), run(8, 0));
    assert_ne!(run(7, 1), run(8, 0)[..29], "seeds are not shifts of each other");
}

#[test]
fn min_tokens_bans_ends_and_ignore_eos_bans_nothing() {
    let logits = vec![5.0, 4.0, 3.0, 2.0];
    let greedy = SamplingParams { temperature: 0.0, min_tokens: 2, stop_token_ids: vec![1], ..params() };
    let mut state = SamplerState::new(greedy, &[], &[0]);
    let drawn: Vec<u32> = (0..3).map(|position| state.sample(&mut logits.clone(), position)).collect();
    assert_eq!(drawn, [2, 2, 0]);
    assert_eq!(state.num_output(), 3);
    let ignoring = SamplingParams { temperature: 0.0, ignore_eos: true, ..params() };
    assert_eq!(SamplerState::new(ignoring, &[], &[0]).sample(&mut logits.clone(), 0), 0);
}

#[test]
fn hopeless_logits_end_the_reply() {
    for temperature in [0.0, 1.0] {
        let sample = |logits: &[f32], eog: &[u32]| {
            let params = SamplingParams { temperature, ..params() };
            SamplerState::new(params, &[], eog).sample(&mut logits.to_vec(), 0)
        };
        assert_eq!(sample(&[f32::NAN; 4], &[3]), 3);
        assert_eq!(sample(&[f32::NEG_INFINITY; 4], &[]), 0);
        assert_eq!(sample(&[], &[2]), 2);
        assert_eq!(sample(&[f32::NAN, 1.0, f32::NAN], &[0]), 1);
        assert_eq!(sample(&[0.0, f32::INFINITY, 3.0], &[0]), 1);
        assert_eq!(sample(&[f32::MIN, f32::MAX, f32::MIN], &[0]), 1);
    }
    let mut ties = vec![1.0; 8];
    let greedy = SamplingParams { temperature: 0.0, ..params() };
    assert_eq!(SamplerState::new(greedy, &[], &[]).sample(&mut ties, 0), 0);
}

#[test]
fn parameters_out_of_range_are_named() {
    let refused = |params: SamplingParams| params.validate().unwrap_err().to_string();
    assert!(refused(SamplingParams { temperature: f32::NAN, ..params() }).starts_with("temperature = NaN"));
    assert!(refused(SamplingParams { temperature: -1.0, ..params() }).starts_with("temperature = -1"));
    assert!(refused(SamplingParams { top_p: 0.0, ..params() }).starts_with("top_p"));
    assert!(refused(SamplingParams { min_p: 1.5, ..params() }).starts_with("min_p"));
    assert!(refused(SamplingParams { repetition_penalty: 0.0, ..params() }).starts_with("repetition_penalty"));
    assert!(refused(SamplingParams { presence_penalty: f32::INFINITY, ..params() }).starts_with("presence_penalty"));
    assert!(refused(SamplingParams { logit_bias: vec![(1, f32::NAN)], ..params() }).starts_with("logit_bias"));
    assert!(params().validate().is_ok());
}
