//! The device's draw against a plain one on the host.

use keepsake_kernels::cuda::ops::{self, SamplingRow, NO_TOKEN};
use keepsake_kernels::KernelError;
use rand::Rng;

use crate::harness::Harness;

pub fn check(h: &mut Harness) -> Result<(), KernelError> {
    let vocabs: &[usize] = if h.is_small { &[50] } else { &[50, 1024, 49_152, 128_256] };
    for &vocab in vocabs {
        let rows: Vec<SamplingRow> = (0..if h.is_small { 4 } else { 48 }).map(|i| random_row(h, i)).collect();
        let mut logits = h.random_f32(rows.len() * vocab, 6.0);
        for (i, row) in logits.chunks_mut(vocab).enumerate() {
            if i % 3 == 0 {
                // Many equal logits, as a peaked or a rounded model gives.
                // Plus zero: minus zero would be another value in the reference's order.
                row.iter_mut().for_each(|logit| *logit = logit.round() + 0.0);
            }
            if i % 5 == 0 {
                row[vocab / 2] = f32::NAN;
                row[vocab / 3] = f32::NEG_INFINITY;
            }
        }
        let (logits_on, rows_on) = (h.upload(&logits)?, h.upload(&rows)?);
        let tokens = h.poisoned::<u32>(rows.len())?;
        ops::sample(&h.stream, logits_on.view(), vocab, rows_on.view(), tokens.view())?;
        let got = h.stream.read(tokens.view())?;
        let mut differing = 0;
        for (i, row) in rows.iter().enumerate() {
            let allowed = allowed_tokens(&logits[i * vocab..(i + 1) * vocab], row);
            if !allowed.contains(&got[i]) {
                differing += 1;
                h.fail(format!("sample (vocab {vocab}, {row:?}): token {}, not one of {allowed:?}", got[i]));
            }
        }
        println!("sampling: vocab {vocab}, {} rows, {differing} differ from the host", rows.len());
        // The same again, bit for bit.
        ops::sample(&h.stream, logits_on.view(), vocab, rows_on.view(), tokens.view())?;
        if h.stream.read(tokens.view())? != got {
            h.fail(format!("sample (vocab {vocab}): not the same twice"));
        }
    }
    let nothing = h.upload(&[f32::NAN, f32::NEG_INFINITY])?;
    let row = h.upload(&[SamplingRow { temperature: 1.0, top_p: 0.9, ..SamplingRow::default() }])?;
    let token = h.poisoned::<u32>(1)?;
    ops::sample(&h.stream, nothing.view(), 2, row.view(), token.view())?;
    if h.stream.read(token.view())? != [NO_TOKEN] {
        h.fail("sample: a row without a finite logit gave a token".to_owned());
    }
    Ok(())
}

fn random_row(h: &mut Harness, i: usize) -> SamplingRow {
    SamplingRow {
        temperature: if i.is_multiple_of(7) { 0.0 } else { h.rng.random_range(0.1..2.0) },
        top_p: if i.is_multiple_of(2) { 1.0 } else { h.rng.random_range(0.05..1.0) },
        min_p: if i % 4 == 3 { h.rng.random_range(0.0..0.5) } else { 0.0 },
        top_k: if i % 3 == 1 { h.rng.random_range(1..100) } else { 0 },
        seed: h.rng.random(),
        position: h.rng.random_range(0..100_000),
    }
}

/// What may be drawn: one token, or two where the draw or a cut falls within 1e-5 of the border between them.
fn allowed_tokens(logits: &[f32], row: &SamplingRow) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if row.temperature == 0.0 {
        return vec![order[0]];
    }
    let max = f64::from(logits[order[0] as usize]);
    let weight = |id: u32| ((f64::from(logits[id as usize]) - max) / f64::from(row.temperature)).exp();
    let mut allowed = Vec::new();
    // Cuts nudged either way, the draw too.
    for nudge in [-1e-5, 0.0, 1e-5] {
        let mut kept = order.clone();
        kept.retain(|&id| weight(id) >= f64::from(row.min_p) * (1.0 + nudge));
        if row.top_k > 0 {
            kept.truncate(row.top_k as usize);
        }
        if row.top_p < 1.0 {
            let wanted = kept.iter().map(|&id| weight(id)).sum::<f64>() * (f64::from(row.top_p) + nudge);
            let mut sum = 0.0;
            let count = kept.iter().take_while(|&&id| {
                let goes_on = sum < wanted;
                sum += weight(id);
                goes_on
            });
            let count = count.count().max(1);
            kept.truncate(count);
        }
        let total: f64 = kept.iter().map(|&id| weight(id)).sum();
        for draw_nudge in [-1e-5, 0.0, 1e-5] {
            let target = (unit(row.seed, row.position) + draw_nudge) * total;
            let mut sum = 0.0;
            let drawn = kept.iter().copied().find(|&id| {
                sum += weight(id);
                sum > target
            });
            let drawn = drawn.unwrap_or(kept[kept.len() - 1]);
            if !allowed.contains(&drawn) {
                allowed.push(drawn);
            }
        }
    }
    allowed
}

fn unit(seed: u64, position: u64) -> f64 {
    const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let start = mix(seed.wrapping_add(GOLDEN_GAMMA));
    let bits = mix(start.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
