//! The architectures beside Llama, with generated weights. Their logits are compared with transformers' on a GPU machine
//! (tests/gpu/run models), on both devices; here the CPU's invariants are.

use std::sync::Arc;

use keepsake_kernels::{Device, DeviceKind};
use keepsake_model::{load, ModelSource};

use crate::support::driver::{blocks_from, Driver, Sequence};

#[test]
fn a_split_prefill_gives_the_same_bits() {
    let device = Device::open(DeviceKind::Cpu, 2).unwrap();
    for shape in ["tiny-qwen2", "tiny-qwen3:bf16", "tiny-opt", "tiny-opt:bf16"] {
        let model = Arc::new(load(&ModelSource::Dummy(shape.to_owned()), &device).unwrap());
        let tokens: Vec<u32> = (0..70).map(|i| (i * 7919 % 512) as u32).collect();
        let sequence = Sequence { blocks: blocks_from(0, tokens.len()), tokens };
        let mut driver = Driver::new(&model, &device, 8, 128);
        let whole = driver.prefill(&sequence);
        assert!(whole.iter().flatten().all(|logit| logit.is_finite()), "{shape}");
        let mut split = driver.step(&[(&sequence, 0..31)]);
        split.extend(driver.step(&[(&sequence, 31..32)]));
        split.extend(driver.step(&[(&sequence, 32..70)]));
        assert!(whole == split, "{shape}");
    }
}

#[test]
fn learned_positions_are_read() {
    let device = Device::open(DeviceKind::Cpu, 1).unwrap();
    let model = Arc::new(load(&ModelSource::Dummy("tiny-opt:bf16".to_owned()), &device).unwrap());
    let mut driver = Driver::new(&model, &device, 4, 8);
    // One token twice: attention sees the same value both times, so that only the position differs.
    let sequence = Sequence { tokens: vec![9, 9], blocks: blocks_from(0, 2) };
    let logits = driver.prefill(&sequence);
    assert!(logits[0] != logits[1]);
}
