//! Every operation against what it means.

use half::{bf16, f16};
use keepsake_kernels::cuda::ops::{self, Activation, Addends, HeadNorms, PositionEmbedding, RopeInputs};
use keepsake_kernels::cuda::{CudaKvPool, Output, View, Weight};
use keepsake_kernels::ops::{self as cpu, Accumulate};
use keepsake_kernels::{
    Activations, BlockId, Buffer, DType, InputForms, KernelError, KvLayout, KvPool, Matrix, RopeScaling, RopeSpec,
    RopeStyle, RopeTable,
};
use rand::seq::SliceRandom;
use rand::Rng;

use crate::harness::Harness;
use crate::{attention, sampling};

pub fn run(h: &mut Harness) -> Result<(), KernelError> {
    let shapes: &[(usize, usize)] = match h.is_small {
        true => &[(1, 8), (3, 576)],
        false => &[(1, 8), (3, 64), (17, 576), (64, 5120), (257, 1536), (33, 4096), (5, 13824)],
    };
    for &(rows, dim) in shapes {
        embedding(h, rows, dim)?;
        gather(h, rows, dim)?;
        norms(h, rows, dim)?;
        activations(h, rows, dim)?;
        uniform(h, rows * dim)?;
    }
    matmuls(h)?;
    ropes(h)?;
    attention::check(h)?;
    sampling::check(h)
}

fn floats(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn embedding(h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
    let case = format!("{rows} x {dim}");
    let (vocab, num_positions, offset) = (301, 40, 2u32);
    let table = h.random(vocab * dim, 1.0);
    let positions_table = h.random(num_positions * dim, 1.0);
    let tokens: Vec<u32> = (0..rows).map(|_| h.rng.random_range(0..vocab as u32)).collect();
    let positions: Vec<u32> = (0..rows).map(|_| h.rng.random_range(0..num_positions as u32 - offset)).collect();

    let matrix = Matrix::pack(&h.reference, DType::BF16, vocab, dim, &bytes(&table))?;
    let want = Buffer::zeros(&h.reference, rows * dim)?;
    h.reference.run(|w| cpu::embedding(w, &matrix, &tokens, &want))?;
    let want = want.read(0..rows * dim)?;

    let weight = Weight::new(h.upload(&table)?, vocab, dim)?;
    let learned = Weight::new(h.upload(&positions_table)?, num_positions, dim)?;
    let (token_ids, position_ids) = (h.upload(&tokens)?, h.upload(&positions)?);
    let out = h.poisoned::<f32>(rows * dim)?;
    ops::embedding(&h.stream, &weight, token_ids.view(), None, rows, out.view())?;
    let got = h.stream.read(out.view())?;
    h.compare("embedding", &case, &got, &want);

    let learned = PositionEmbedding { table: &learned, positions: position_ids.view(), offset };
    ops::embedding(&h.stream, &weight, token_ids.view(), Some(learned), rows, out.view())?;
    let got = h.stream.read(out.view())?;
    let added: Vec<f32> = (0..rows * dim)
        .map(|i| {
            let position = (positions[i / dim] + offset) as usize;
            want[i] + positions_table[position * dim + i % dim].to_f32()
        })
        .collect();
    h.compare("embedding", &format!("{case}, learned positions"), &got, &added);

    // An index out of range shows as NaN and touches nothing else.
    let bad = h.upload(&[vocab as u32])?;
    ops::embedding(&h.stream, &weight, bad.view(), None, 1, out.view())?;
    if h.stream.read(out.slice(0..dim)?)?.iter().any(|value| !value.is_nan()) {
        h.fail("embedding of a token past the table is not NaN".to_owned());
    }
    Ok(())
}

fn gather(h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
    let x = h.random_f32(rows * dim, 1.0);
    let indices: Vec<u32> = (0..rows.div_ceil(2)).map(|_| h.rng.random_range(0..rows as u32)).collect();
    let (from, ids) = (h.upload(&x)?, h.upload(&indices)?);
    let out = h.poisoned::<f32>(indices.len() * dim)?;
    ops::gather_rows(&h.stream, from.view(), rows, ids.view(), indices.len(), dim, out.view())?;
    let got = h.stream.read(out.view())?;
    let want: Vec<f32> = indices.iter().flat_map(|&i| x[i as usize * dim..(i as usize + 1) * dim].to_vec()).collect();
    h.compare("gather_rows", &format!("{rows} x {dim}"), &got, &want);
    Ok(())
}

fn norms(h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
    let eps = 1e-5;
    let x = h.random_f32(rows * dim, 4.0);
    let delta = h.random(rows * dim, 2.0);
    let (bias, weight, shift) = (h.random_f32(dim, 1.0), h.random_f32(dim, 1.0), h.random_f32(dim, 1.0));
    let (delta_on, bias_on) = (h.upload(&delta)?, h.upload(&bias)?);
    let (weight_on, shift_on) = (h.upload(&weight)?, h.upload(&shift)?);
    for with in [false, true] {
        let case = format!("{rows} x {dim}{}", if with { ", addends" } else { "" });
        let sum: Vec<f32> = match with {
            false => x.clone(),
            true => (0..rows * dim).map(|i| x[i] + delta[i].to_f32() + bias[i % dim]).collect(),
        };
        let addends = match with {
            false => Addends::none(),
            true => Addends { delta: delta_on.view(), bias: bias_on.view() },
        };
        let want = Buffer::zeros(&h.reference, rows * dim)?;
        let sum_at = Buffer::from_slice(&h.reference, &sum)?;
        let weight_at = Buffer::from_slice(&h.reference, &weight)?;
        h.reference.run(|w| cpu::rms_norm(w, &sum_at, &weight_at, eps, rows, dim, &want))?;
        let x_on = h.upload(&x)?;
        let out = h.poisoned::<bf16>(rows * dim)?;
        ops::rms_norm(&h.stream, x_on.view(), addends, weight_on.view(), eps, rows, dim, out.view())?;
        let got = h.read_bf16(out.view())?;
        h.compare("rms_norm", &case, &got, &want.read(0..rows * dim)?);
        let got = h.stream.read(x_on.view())?;
        h.compare("add_bias", &format!("{case}, in the norm"), &got, &sum);

        let want: Vec<f32> = sum.chunks(dim).flat_map(|row| layer_norm(row, &weight, &shift, eps)).collect();
        let x_on = h.upload(&x)?;
        let out = h.poisoned::<bf16>(rows * dim)?;
        let (weight, shift) = (weight_on.view(), shift_on.view());
        ops::layer_norm(&h.stream, x_on.view(), addends, weight, shift, eps, rows, dim, out.view())?;
        let got = h.read_bf16(out.view())?;
        h.compare("layer_norm", &case, &got, &want);
    }
    let x_on = h.upload(&x)?;
    ops::add_bias(&h.stream, x_on.view(), bias_on.view(), rows, dim)?;
    let got = h.stream.read(x_on.view())?;
    let want: Vec<f32> = (0..rows * dim).map(|i| x[i] + bias[i % dim]).collect();
    h.compare("add_bias", &format!("{rows} x {dim}"), &got, &want);
    Ok(())
}

fn layer_norm(row: &[f32], weight: &[f32], shift: &[f32], eps: f32) -> Vec<f32> {
    let n = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    (0..row.len())
        .map(|i| ((f64::from(row[i]) - mean) * factor * f64::from(weight[i]) + f64::from(shift[i])) as f32)
        .collect()
}

fn activations(h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
    let case = format!("{rows} x {dim}");
    let x = h.random(rows * 2 * dim, 8.0);
    let half = |which: usize| -> Vec<f32> {
        x.chunks(2 * dim).flat_map(|row| floats(&row[which * dim..(which + 1) * dim])).collect()
    };
    let (gate, up) = (Buffer::from_slice(&h.reference, &half(0))?, Buffer::from_slice(&h.reference, &half(1))?);
    let want = Buffer::zeros(&h.reference, rows * dim)?;
    h.reference.run(|w| cpu::silu_mul(w, &gate, &up, rows, dim, &want))?;
    let x_on = h.upload(&x)?;
    let out = h.poisoned::<bf16>(rows * dim)?;
    ops::silu_mul(&h.stream, x_on.view(), rows, dim, out.view())?;
    let got = h.read_bf16(out.view())?;
    h.compare("silu_mul", &case, &got, &want.read(0..rows * dim)?);

    let x = h.random(rows * dim, 4.0);
    let bias = h.random_f32(dim, 1.0);
    let bias_on = h.upload(&bias)?;
    for activation in [Activation::Identity, Activation::Relu, Activation::GeluErf, Activation::GeluTanh] {
        for with_bias in [false, true] {
            let want: Vec<f32> = (0..rows * dim)
                .map(|i| {
                    let add = if with_bias { f64::from(bias[i % dim]) } else { 0.0 };
                    activate(activation, f64::from(x[i].to_f32()) + add) as f32
                })
                .collect();
            let x_on = h.upload(&x)?;
            let bias = if with_bias { bias_on.view() } else { View::none() };
            ops::bias_activate(&h.stream, x_on.view(), bias, activation, rows, dim)?;
            let got = h.read_bf16(x_on.view())?;
            h.compare("bias_activate", &format!("{case}, {activation:?}, bias {with_bias}"), &got, &want);
        }
    }
    let nan = h.upload(&[bf16::NAN; 8])?;
    ops::bias_activate(&h.stream, nan.view(), View::none(), Activation::Relu, 1, 8)?;
    if h.read_bf16(nan.view())?.iter().any(|value| !value.is_nan()) {
        h.fail("ReLU hides NaN".to_owned());
    }
    Ok(())
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

/// The error function by its series and, far out, its continued fraction's limit.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.5 {
        return x.signum();
    }
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

fn uniform(h: &mut Harness, len: usize) -> Result<(), KernelError> {
    let (seed, half_width) = (h.rng.random::<u64>(), 0.03f32);
    let out = h.poisoned::<bf16>(len)?;
    ops::fill_uniform(&h.stream, seed, half_width, out.view())?;
    let got = h.read_bf16(out.view())?;
    let mut state = seed;
    let want: Vec<f32> = (0..len)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let unit = ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(unit * half_width).to_f32()
        })
        .collect();
    h.compare("fill_uniform", &format!("{len}"), &got, &want);
    Ok(())
}

fn matmuls(h: &mut Harness) -> Result<(), KernelError> {
    let shapes: &[(usize, usize, usize)] = match h.is_small {
        true => &[(3, 24, 64)],
        false => &[(1, 960, 576), (7, 49, 64), (64, 1536, 576), (130, 576, 1536), (3, 24, 8), (33, 1000, 2048)],
    };
    for &(rows, n, k) in shapes {
        let case = format!("{rows} x {k} by {n}");
        let (x, weight) = (h.random(rows * k, 1.0), h.random(n * k, 1.0 / (k as f32).sqrt()));
        let before = h.random_f32(rows * n, 1.0);
        let matrix = Matrix::pack(&h.reference, DType::BF16, n, k, &bytes(&weight))?;
        let x_at = Buffer::from_slice(&h.reference, &floats(&x))?;
        let input = Activations::new(&h.reference, rows, k, InputForms::for_matrices([&matrix]))?;
        let want = Buffer::zeros(&h.reference, rows * n)?;
        let sum = Buffer::from_slice(&h.reference, &before)?;
        h.reference.run(|w| {
            cpu::prepare(w, &x_at, rows, k, &input)?;
            cpu::matmul(w, &input, &matrix, &want, Accumulate::Set)?;
            cpu::matmul(w, &input, &matrix, &sum, Accumulate::Add)
        })?;
        let (want, sum) = (want.read(0..rows * n)?, sum.read(0..rows * n)?);

        let weight = Weight::new(h.upload(&weight)?, n, k)?;
        let x_on = h.upload(&x)?;
        let out = h.poisoned::<bf16>(rows * n)?;
        h.blas.matmul(&h.stream, x_on.view(), rows, &weight, Output::Bf16(out.view()))?;
        let got = h.read_bf16(out.view())?;
        h.compare("matmul bf16", &case, &got, &want);
        let out = h.poisoned::<f32>(rows * n)?;
        h.blas.matmul(&h.stream, x_on.view(), rows, &weight, Output::F32(out.view(), Accumulate::Set))?;
        let got = h.stream.read(out.view())?;
        h.compare("matmul f32", &case, &got, &want);
        let out = h.upload(&before)?;
        h.blas.matmul(&h.stream, x_on.view(), rows, &weight, Output::F32(out.view(), Accumulate::Add))?;
        let got = h.stream.read(out.view())?;
        h.compare("matmul f32", &format!("{case}, added"), &got, &sum);
    }
    Ok(())
}

fn ropes(h: &mut Harness) -> Result<(), KernelError> {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 512.0,
        attention_factor: None,
    };
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 512.0 };
    // heads, K/V heads, head_dim, rotated, chunk_tokens, rows, scaling
    let all = [
        (4, 4, 64, 64, 16, 5, RopeScaling::None),
        (9, 3, 64, 64, 32, 37, RopeScaling::Linear { factor: 2.0 }),
        (8, 2, 128, 128, 32, 70, llama3),
        (6, 2, 128, 64, 32, 21, yarn),
        (2, 1, 80, 80, 64, 9, RopeScaling::None),
        (3, 1, 96, 96, 32, 11, yarn),
        (4, 2, 256, 256, 32, 13, llama3),
    ];
    let cases = if h.is_small { &all[1..3] } else { &all[..] };
    for &(num_heads, num_kv_heads, head_dim, rotary_dim, chunk_tokens, rows, scaling) in cases {
        for with in [false, true] {
            let layout = KvLayout { num_layers: 2, num_kv_heads, head_dim, chunk_tokens };
            let spec = RopeSpec {
                style: RopeStyle::HalfSplit,
                rotary_dim,
                theta: 10_000.0,
                scaling,
                freq_factors: None,
                max_positions: 2048,
            };
            rope(h, layout, num_heads, &spec, rows, with)?;
        }
    }
    Ok(())
}

/// q, k and v of random rows to random slots. `with`: a bias and norms of the heads, whose reference is computed first.
fn rope(
    h: &mut Harness,
    layout: KvLayout,
    num_heads: usize,
    spec: &RopeSpec,
    rows: usize,
    with: bool,
) -> Result<(), KernelError> {
    let case = format!("{num_heads}/{} heads of {}, {:?}, {with}", layout.num_kv_heads, layout.head_dim, spec.scaling);
    let (head_dim, kv_len) = (layout.head_dim, layout.token_len());
    let q_len = num_heads * head_dim;
    let width = q_len + 2 * kv_len;
    let num_blocks = rows.div_ceil(layout.chunk_tokens) + 3;
    let mut slots: Vec<u32> = (0..(num_blocks * layout.chunk_tokens) as u32).collect();
    slots.shuffle(&mut h.rng);
    slots.truncate(rows);
    let positions: Vec<u32> = (0..rows).map(|_| h.rng.random_range(0..spec.max_positions as u32)).collect();
    let qkv = h.random(rows * width, 2.0);
    let (bias, q_weight, k_weight) =
        (h.random_f32(width, 1.0), h.random_f32(head_dim, 1.0), h.random_f32(head_dim, 1.0));

    let mut rows_of = [Vec::new(), Vec::new(), Vec::new()];
    for row in qkv.chunks(width) {
        let mut row = floats(row);
        if with {
            row.iter_mut().zip(&bias).for_each(|(value, add)| *value += add);
            let (q, kv) = row.split_at_mut(q_len);
            q.chunks_mut(head_dim).for_each(|head| rms_norm_head(head, &q_weight));
            kv[..kv_len].chunks_mut(head_dim).for_each(|head| rms_norm_head(head, &k_weight));
        }
        rows_of[0].extend_from_slice(&row[..q_len]);
        rows_of[1].extend_from_slice(&row[q_len..q_len + kv_len]);
        rows_of[2].extend_from_slice(&row[q_len + kv_len..]);
    }
    let table = RopeTable::new(spec)?;
    let want_pool = KvPool::new(&h.reference, layout, num_blocks)?;
    let [q, k, v] = rows_of.map(|rows| Buffer::from_slice(&h.reference, &rows));
    let (q, k, v) = (q?, k?, v?);
    h.reference.run(|w| cpu::rope_and_write(w, &q, &k, &v, &positions, &slots, &table, &want_pool, 1, num_heads))?;

    let pool = CudaKvPool::new(&h.context, layout, num_blocks)?;
    for layer in 0..2 {
        h.stream.fill_bytes(pool.layer(layer)?, 0)?;
    }
    let table = ops::CudaRopeTable::new(&h.context, &table)?;
    let (qkv, bias) = (h.upload(&qkv)?, h.upload(&bias)?);
    let (q_weight, k_weight) = (h.upload(&q_weight)?, h.upload(&k_weight)?);
    let (position_ids, slot_ids) = (h.upload(&positions)?, h.upload(&slots)?);
    let inputs = RopeInputs {
        qkv: qkv.view(),
        bias: if with { bias.view() } else { View::none() },
        norms: match with {
            false => HeadNorms::none(),
            true => HeadNorms { q: q_weight.view(), k: k_weight.view(), eps: 1e-6 },
        },
        positions: position_ids.view(),
        slots: slot_ids.view(),
        table: Some(&table),
    };
    let q_out = h.poisoned::<bf16>(rows * q_len)?;
    ops::rope_and_write(&h.stream, &inputs, rows, num_heads, &pool, 1, q_out.view())?;
    let got = h.read_bf16(q_out.view())?;
    h.compare("rope q", &case, &got, &q.read(0..rows * q_len)?);
    // Also the slots that nobody wrote: they stay zero. Layer 0 too.
    for layer in 0..2 {
        let got = h.read_bf16(pool.layer(layer)?)?;
        let want = host_layer(&want_pool, layer)?;
        if layer == 1 {
            h.compare("rope k v", &case, &got, &want);
        } else if got != want {
            h.fail(format!("rope ({case}): another layer was written"));
        }
    }
    // A slot out of range is not written.
    let bad = h.upload(&vec![(num_blocks * layout.chunk_tokens) as u32; rows])?;
    ops::rope_and_write(
        &h.stream,
        &RopeInputs { slots: bad.view(), ..inputs },
        rows,
        num_heads,
        &pool,
        0,
        q_out.view(),
    )?;
    if h.read_bf16(pool.layer(0)?)?.iter().any(|&value| value != 0.0) {
        h.fail(format!("rope ({case}): a slot out of range was written"));
    }
    Ok(())
}

fn rms_norm_head(head: &mut [f32], weight: &[f32]) {
    let mean = head.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / head.len() as f64;
    let factor = 1.0 / (mean + 1e-6).sqrt();
    for (value, weight) in head.iter_mut().zip(weight) {
        *value = (f64::from(*value) * factor * f64::from(*weight)) as f32;
    }
}

/// A layer of the CPU's pool, which holds f16.
fn host_layer(pool: &KvPool, layer: usize) -> Result<Vec<f32>, KernelError> {
    let mut values = Vec::new();
    let mut block_bytes = vec![0; pool.layout().layer_chunk_bytes()];
    for block in 0..pool.num_blocks() as u32 {
        pool.read_layer(BlockId(block), layer, &mut block_bytes)?;
        values.extend(block_bytes.chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]]).to_f32()));
    }
    Ok(values)
}
