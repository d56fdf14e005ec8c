//! The forward pass of tiny models in every stored type and file format, against a plain f64 one.

use std::f64::consts::TAU;
use std::sync::Arc;

use keepsake_kernels::{DType, Device, DeviceKind};
use keepsake_model::Model;
use serde_json::json;

use crate::support::blocks::ALL_DTYPES;
use crate::support::driver::{blocks_from, Driver, Sequence};
use crate::support::gguf_writer::Item;
use crate::support::reference;
use crate::support::tiny::{load_bytes, TinyModel, SHAPE, THETA};

fn device() -> Device {
    Device::open(DeviceKind::Cpu, 2).unwrap()
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 37 % SHAPE.vocab_size) as u32).collect()
}

/// Logits at every position, and K/V.
fn run(model: &Arc<Model>, device: &Device, tokens: &[u32]) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let sequence = Sequence { blocks: blocks_from(1, tokens.len()), tokens: tokens.to_vec() };
    let mut driver = Driver::new(model, device, 16, tokens.len());
    (driver.prefill(&sequence), driver.kv(&sequence))
}

/// Largest difference beside the spread of the logits.
fn assert_close(what: &str, model: &Arc<Model>, device: &Device, tiny: &TinyModel) {
    let tokens = tokens(70);
    let (logits, _) = run(model, device, &tokens);
    let wanted = reference::logits(tiny, &tokens);
    let all = wanted.iter().flatten();
    let spread = (all.map(|value| value * value).sum::<f64>() / (wanted.len() * SHAPE.vocab_size) as f64).sqrt();
    let mut worst = 0f64;
    for (row, wanted) in logits.iter().zip(&wanted) {
        assert_eq!(row.len(), wanted.len());
        for (&value, wanted) in row.iter().zip(wanted) {
            worst = worst.max((f64::from(value) - wanted).abs());
        }
    }
    println!("{what}: off by {worst:.5}, logits spread {spread:.3}");
    assert!(spread > 0.1, "{what}: logits of {spread} say nothing");
    assert!(worst < 0.005 * spread, "{what}: off by {worst}, logits spread {spread}");
}

#[test]
fn every_dtype_agrees_with_the_reference() {
    let device = device();
    for (seed, dtype) in ALL_DTYPES.into_iter().enumerate() {
        let tiny = TinyModel::new(seed as u64, dtype, seed % 2 == 0);
        assert_close(&format!("{dtype}"), &tiny.load_gguf(&device), &device, &tiny);
    }
}

#[test]
fn folders_agree_with_the_reference() {
    let device = device();
    for (dtype, tied, num_shards) in [(DType::F32, false, 1), (DType::F16, true, 3), (DType::BF16, false, 4)] {
        let tiny = TinyModel::new(11, dtype, tied);
        let model = tiny.load_folder(num_shards, &device);
        assert_close(&format!("{dtype}, {num_shards} shards"), &model, &device, &tiny);
    }
}

#[test]
fn gguf_and_folder_give_the_same_bits() {
    let device = device();
    for tied in [false, true] {
        let tiny = TinyModel::new(5, DType::F32, tied);
        let tokens = tokens(45);
        let from_gguf = run(&tiny.load_gguf(&device), &device, &tokens);
        let from_folder = run(&tiny.load_folder(2, &device), &device, &tokens);
        assert!(from_gguf == from_folder);
    }
}

#[test]
fn linear_scaling_stretches_positions() {
    let device = device();
    let mut tiny = TinyModel::new(3, DType::F32, true);
    tiny.inverse_frequencies.iter_mut().for_each(|value| *value /= 4.0);
    tiny.rope_scaling = json!({ "type": "linear", "factor": 4.0 });
    assert_close("linear, folder", &tiny.load_folder(1, &device), &device, &tiny);
    let mut writer = tiny.gguf();
    writer.text("llama.rope.scaling.type", "linear").item("llama.rope.scaling.factor", Item::F32(4.0));
    assert_close("linear, gguf", &load_bytes(&writer.bytes(), &device), &device, &tiny);
}

#[test]
fn llama3_scaling_from_either_file() {
    let device = device();
    let mut tiny = TinyModel::new(4, DType::F32, true);
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 64.0);
    let mut divisors = Vec::new();
    for value in &mut tiny.inverse_frequencies {
        let wavelength = TAU / *value;
        let scaled = if wavelength < original / high {
            *value
        } else if wavelength > original / low {
            *value / factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * *value / factor + smooth * *value
        };
        divisors.push((*value / scaled) as f32);
        *value = scaled;
    }
    assert!(divisors.iter().any(|&by| by > 1.01 && by < 7.99), "a ramp is part of the test");
    tiny.rope_scaling = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": original as usize,
    });
    assert_close("llama3, folder", &tiny.load_folder(1, &device), &device, &tiny);
    let bytes = divisors.iter().flat_map(|by| by.to_le_bytes()).collect();
    let mut writer = tiny.gguf();
    writer.tensor("rope_freqs.weight", DType::F32, &[divisors.len()], bytes);
    assert_close("llama3, gguf", &load_bytes(&writer.bytes(), &device), &device, &tiny);
}

#[test]
fn yarn_scaling_from_either_file() {
    let device = device();
    let mut tiny = TinyModel::new(6, DType::F32, true);
    let (factor, original) = (4.0f64, 128.0);
    let pair = |turns: f64| SHAPE.head_dim as f64 * (original / (turns * TAU)).ln() / (2.0 * THETA.ln());
    let (low, high) = (pair(32.0).floor().max(0.0), pair(1.0).ceil());
    for (index, value) in tiny.inverse_frequencies.iter_mut().enumerate() {
        let ramp = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
        *value = *value / factor * ramp + *value * (1.0 - ramp);
    }
    tiny.rope_amplitude = 0.1 * factor.ln() + 1.0;
    tiny.rope_scaling = json!({
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 128,
    });
    assert_close("yarn, folder", &tiny.load_folder(1, &device), &device, &tiny);
    let mut writer = tiny.gguf();
    writer
        .text("llama.rope.scaling.type", "yarn")
        .item("llama.rope.scaling.factor", Item::F32(factor as f32))
        .number("llama.rope.scaling.original_context_length", 128);
    assert_close("yarn, gguf", &load_bytes(&writer.bytes(), &device), &device, &tiny);
}
