//! The demo model against logits of another implementation (`fixtures/logits.json`).

use std::path::PathBuf;
use std::sync::Arc;

use keepsake_kernels::{Device, DeviceKind};
use keepsake_model::{load, Model, ModelSource};
use serde::Deserialize;

use crate::support::driver::{blocks_from, Driver, Sequence};

const TOLERANCE: f32 = 0.05;
/// Under this margin another rounding may choose the other token.
const CLEAR_MARGIN: f32 = 0.1;

#[derive(Deserialize)]
struct Golden {
    name: String,
    tokens: Vec<u32>,
    /// `prompt_top5` is of positions 0, n, 2n, ...
    prompt_top5_every: usize,
    prompt_top5: Vec<Vec<(usize, f32)>>,
    greedy: Vec<u32>,
    greedy_margin: Vec<f32>,
    greedy_top5: Vec<Vec<(usize, f32)>>,
}

fn demo_model(device: &Device) -> Arc<Model> {
    let path = match std::env::var_os("KEEPSAKE_DEMO_MODEL") {
        Some(path) => PathBuf::from(path),
        None => keepsake_config::data_dir().join("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.exists(), "the demo model is not at {}: run `make setup`", path.display());
    Arc::new(load(&ModelSource::Gguf(path), device).unwrap())
}

#[test]
fn logits_of_the_demo_model_are_golden() {
    let device = Device::open(DeviceKind::Cpu, 0).unwrap();
    let model = demo_model(&device);
    let golden: Vec<Golden> = serde_json::from_str(include_str!("../fixtures/logits.json")).unwrap();
    assert!(!golden.is_empty());
    let mut worst = 0f32;
    for case in golden {
        let num_tokens = case.tokens.len() + case.greedy.len();
        let mut driver = Driver::new(&model, &device, num_tokens.div_ceil(32), case.tokens.len());
        let mut sequence = Sequence { blocks: blocks_from(0, num_tokens), tokens: case.tokens };
        let mut check = |place: &str, logits: &[f32], top: &[(usize, f32)]| {
            for &(token, wanted) in top {
                let error = (logits[token] - wanted).abs();
                worst = worst.max(error);
                assert!(
                    error <= TOLERANCE,
                    "{}, {place}, token {token}: {} instead of {wanted}",
                    case.name,
                    logits[token]
                );
            }
        };
        let logits = driver.prefill(&sequence);
        for (index, top) in case.prompt_top5.iter().enumerate() {
            let position = index * case.prompt_top5_every;
            check(&format!("position {position}"), &logits[position], top);
        }
        let mut next = logits.last().unwrap().clone();
        for (step, &wanted) in case.greedy.iter().enumerate() {
            check(&format!("greedy step {step}"), &next, &case.greedy_top5[step]);
            if case.greedy_margin[step] < CLEAR_MARGIN {
                break;
            }
            assert_eq!(argmax(&next), wanted, "{}, greedy step {step}", case.name);
            let position = sequence.tokens.len();
            sequence.tokens.push(wanted);
            next = driver.step(&[(&sequence, position..position + 1)]).remove(0);
        }
    }
    println!("largest difference to golden logits: {worst}");
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}
