//! Machines to simulate when no calibration is at hand: costs derived from published sizes and measured rates.
//!
//! For the two GPU presets, one H200 was measured (CUDA 13.0): bf16 matrix products 794 TFLOP/s, causal attention with FlashAttention-2
//! 332 TFLOP/s at 8K, device memory 4.3 TB/s, pinned copies 55 GB/s each way, disk 1.3 GB/s. A token costs 2 FLOP a parameter and, over
//! a context of l, 4 * layers * width * l FLOP of attention; a decode row reads all K/V of its context; a step reads all weights.

use keepsake_tiers::eviction::CostCurve;

use crate::core::{Costs, RouteCost, TierCosts};

use super::SimulateError;

/// Names of the presets.
pub const MACHINES: &[&str] = &["cpu", "h200-13b", "h200-8b", "saturation"];

const MATMUL_FLOPS: f64 = 794e12;
const ATTENTION_FLOPS: f64 = 332e12;
const DEVICE_BYTES: f64 = 4.3e12;
const BUS_BYTES: f64 = 55e9;
const DISK_BYTES: f64 = 1.3e9;
/// Where the straight lines that these costs are get their second point.
const FAR: u32 = 131_072;

/// Costs of a named machine for chunks of `chunk_tokens`, with DRAM and disk as the tiers below the device.
pub fn machine(name: &str, chunk_tokens: usize) -> Result<Costs, SimulateError> {
    match name {
        // 40 layers, width 5120, full attention heads: 0.82 MB of K/V a token.
        "h200-13b" => Ok(gpu(Shape { parameters: 13e9, layers: 40.0, width: 5120.0, kv_width: 5120.0 }, chunk_tokens)),
        // 32 layers, width 4096, 8 of 32 heads have K/V: 131 kB a token.
        "h200-8b" => Ok(gpu(Shape { parameters: 8e9, layers: 32.0, width: 4096.0, kv_width: 1024.0 }, chunk_tokens)),
        "cpu" => Ok(cpu(chunk_tokens)),
        "saturation" => Ok(saturation(chunk_tokens)),
        _ => Err(SimulateError::Settings(format!("--machine {name}: must be one of {}", MACHINES.join(", ")))),
    }
}

struct Shape {
    parameters: f64,
    layers: f64,
    width: f64,
    kv_width: f64,
}

fn gpu(shape: Shape, chunk_tokens: usize) -> Costs {
    let Shape { parameters, layers, width, kv_width } = shape;
    let tokens = chunk_tokens as f64;
    let bf16 = 2.0;
    let kv_bytes = 2.0 * layers * kv_width * bf16;
    let products = 2.0 * parameters / MATMUL_FLOPS;
    let attention = 4.0 * layers * width / ATTENTION_FLOPS;
    Costs {
        step: parameters * bf16 / DEVICE_BYTES,
        chunk: line(tokens * products, tokens * attention),
        decode_row: line(products, kv_bytes / DEVICE_BYTES),
        tiers: tiers(kv_bytes * tokens, BUS_BYTES, DISK_BYTES),
    }
}

/// The README's measurements of the demo model on two cores. 512 tokens at 2,214 a second and 1,500 in 960 ms give 0.36 ms a token and
/// 0.37 us more for each token of context; one stream of 135 tokens a second and eight of 542 give 6.3 ms a step and 1.05 ms a row.
/// Its K/V is 23 kB a token; a copy in memory was not measured and is taken as 5 GB/s.
fn cpu(chunk_tokens: usize) -> Costs {
    let tokens = chunk_tokens as f64;
    Costs {
        step: 6.3e-3,
        chunk: line(tokens * 0.36e-3, tokens * 0.37e-6),
        decode_row: line(1.0e-3, 0.4e-6),
        tiers: tiers(23_040.0 * tokens, 5e9, DISK_BYTES),
    }
}

/// The closed-loop model of a saturated server: 26 us a prompt token at any context, 50 ms of decode a turn (here 5 rows of 10 ms,
/// which no batching makes cheaper), 131 kB of K/V a token, as measured with 118 GB for 128 users of 7,000 tokens.
fn saturation(chunk_tokens: usize) -> Costs {
    let tokens = chunk_tokens as f64;
    Costs {
        step: 0.0,
        chunk: line(tokens * 26e-6, 0.0),
        decode_row: line(10e-3, 0.0),
        tiers: tiers(131_072.0 * tokens, BUS_BYTES, DISK_BYTES),
    }
}

fn tiers(chunk_bytes: f64, memory: f64, disk: f64) -> Vec<TierCosts> {
    let route = |latency: f64, rate: f64| {
        let cost = RouteCost { latency, chunk: chunk_bytes / rate };
        TierCosts { load: cost, store: cost }
    };
    // Ten microseconds to start a copy; half a millisecond until a database has found a value.
    vec![route(10e-6, memory), route(0.5e-3, disk)]
}

/// `constant` seconds and `slope` more for each token of context.
fn line(constant: f64, slope: f64) -> CostCurve {
    let at = |length: u32| (length, constant + slope * f64::from(length));
    CostCurve::new(vec![at(1), at(FAR)]).expect("ascending and positive")
}
