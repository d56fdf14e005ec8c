//! How long kernels take, beside what their bytes or operations need at least.

use half::bf16;
use keepsake_kernels::cuda::ops::{self, Addends, Attention, HeadNorms, RopeInputs, SamplingRow};
use keepsake_kernels::cuda::{CudaKvPool, DeviceBuffer, Output, View, Weight};
use keepsake_kernels::ops::Accumulate;
use keepsake_kernels::{BlockId, Entry, KernelError, RopeScaling, RopeSpec, RopeStyle, RopeTable};
use rand::seq::SliceRandom;
use rand::Rng;

use crate::attention::{Case, Uploaded, TIMED};
use crate::harness::Harness;

/// Input sets that launches rotate among, so that none finds its input in the cache.
const SETS: usize = 8;

struct Times {
    /// Bytes a second that a large copy on the device reads and writes.
    bandwidth: f64,
}

pub fn run(h: &mut Harness) -> Result<(), KernelError> {
    let times = Times { bandwidth: copy_bandwidth(h)? };
    println!("device copy: {:.0} GB/s read and written", times.bandwidth / 1e9);
    println!("{:<44} {:>10} {:>10} {:>10} {:>7}", "kernel", "us", "MB", "floor us", "share");
    for rows in [64, 2048] {
        times.norm(h, rows, 5120)?;
        times.silu(h, rows, 13824)?;
        times.rope(h, rows, &TIMED[0])?;
        times.rope(h, rows, &TIMED[1])?;
    }
    times.embedding(h, 2048, 5120)?;
    times.sampling(h, 32_000, false)?;
    times.sampling(h, 32_000, true)?;
    times.sampling(h, 128_256, false)?;
    times.sampling(h, 128_256, true)?;
    for rows in [1, 64, 192] {
        for (n, k) in [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)] {
            times.product(h, rows, n, k, false)?;
        }
    }
    times.product(h, 64, 5120, 13824, true)?;
    for rows in [512, 2048, 8192] {
        products_rate(h, rows, 27648, 5120)?;
    }
    products_rate(h, 8192, 8192, 8192)?;
    for case in &TIMED {
        for context in [1024, 8192] {
            times.decode(h, case, 64, context)?;
        }
    }
    for case in &TIMED {
        prefill(h, case, 8192)?;
        prefill(h, case, 2048)?;
    }
    Ok(())
}

fn copy_bandwidth(h: &Harness) -> Result<f64, KernelError> {
    let len = 2usize << 30;
    let from = DeviceBuffer::<u8>::zeros(&h.context, "a copy's source", len)?;
    let to = DeviceBuffer::<u8>::zeros(&h.context, "a copy's target", len)?;
    let seconds = h.median(|| h.stream.copy(from.view(), to.view()))?;
    Ok(2.0 * len as f64 / seconds)
}

fn random_bf16(h: &mut Harness, len: usize, half_width: f32) -> Result<DeviceBuffer<bf16>, KernelError> {
    let data = DeviceBuffer::new(&h.context, "a test's input", len)?;
    ops::fill_uniform(&h.stream, h.rng.random(), half_width, data.view())?;
    Ok(data)
}

impl Times {
    fn line(&self, what: &str, seconds: f64, bytes: f64) {
        let floor = bytes / self.bandwidth;
        println!(
            "{what:<44} {:>10.1} {:>10.1} {:>10.1} {:>6.0}%",
            seconds * 1e6,
            bytes / 1e6,
            floor * 1e6,
            floor / seconds * 100.0
        );
    }

    fn norm(&self, h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
        let x: Vec<_> = (0..SETS).map(|_| h.random_f32(rows * dim, 1.0)).collect();
        let x: Vec<_> = x.iter().map(|x| h.upload(x)).collect::<Result<_, _>>()?;
        let weight = h.upload(&vec![1.0f32; dim])?;
        let out: Vec<_> = (0..SETS).map(|_| h.poisoned::<bf16>(rows * dim)).collect::<Result<_, _>>()?;
        let seconds = h.seconds(SETS, |i| {
            let (x, out) = (x[i].view(), out[i].view());
            ops::rms_norm(&h.stream, x, Addends::none(), weight.view(), 1e-5, rows, dim, out)
        })?;
        self.line(&format!("rms_norm {rows} x {dim}"), seconds, (rows * dim * 6) as f64);
        Ok(())
    }

    fn silu(&self, h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
        let x: Vec<_> = (0..SETS).map(|_| random_bf16(h, rows * 2 * dim, 2.0)).collect::<Result<_, _>>()?;
        let out: Vec<_> = (0..SETS).map(|_| h.poisoned::<bf16>(rows * dim)).collect::<Result<_, _>>()?;
        let seconds = h.seconds(SETS, |i| ops::silu_mul(&h.stream, x[i].view(), rows, dim, out[i].view()))?;
        self.line(&format!("silu_mul {rows} x {dim}"), seconds, (rows * dim * 6) as f64);
        Ok(())
    }

    fn rope(&self, h: &mut Harness, rows: usize, case: &Case) -> Result<(), KernelError> {
        let layout = case.layout(SETS);
        let width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim;
        let pool = CudaKvPool::new(&h.context, layout, rows.div_ceil(case.chunk_tokens))?;
        let spec = RopeSpec {
            style: RopeStyle::HalfSplit,
            rotary_dim: case.head_dim,
            theta: 10_000.0,
            scaling: RopeScaling::None,
            freq_factors: None,
            max_positions: 8192,
        };
        let table = ops::CudaRopeTable::new(&h.context, &RopeTable::new(&spec)?)?;
        let qkv: Vec<_> = (0..SETS).map(|_| random_bf16(h, rows * width, 2.0)).collect::<Result<_, _>>()?;
        let q_len = rows * case.num_heads * case.head_dim;
        let q: Vec<_> = (0..SETS).map(|_| h.poisoned::<bf16>(q_len)).collect::<Result<_, _>>()?;
        let positions: Vec<u32> = (0..rows as u32).collect();
        let ids = h.upload(&positions)?;
        let seconds = h.seconds(SETS, |i| {
            let inputs = RopeInputs {
                qkv: qkv[i].view(),
                bias: View::none(),
                norms: HeadNorms::none(),
                positions: ids.view(),
                slots: ids.view(),
                table: Some(&table),
            };
            ops::rope_and_write(&h.stream, &inputs, rows, case.num_heads, &pool, i, q[i].view())
        })?;
        let what = format!("rope_and_write {rows} x {}/{} heads", case.num_heads, case.num_kv_heads);
        self.line(&what, seconds, (rows * width * 4) as f64);
        Ok(())
    }

    fn embedding(&self, h: &mut Harness, rows: usize, dim: usize) -> Result<(), KernelError> {
        let vocab = 32_000;
        let table = Weight::new(random_bf16(h, vocab * dim, 1.0)?, vocab, dim)?;
        let tokens: Vec<u32> = (0..rows).map(|_| h.rng.random_range(0..vocab as u32)).collect();
        let tokens = h.upload(&tokens)?;
        let out: Vec<_> = (0..SETS).map(|_| h.poisoned::<f32>(rows * dim)).collect::<Result<_, _>>()?;
        let seconds =
            h.seconds(SETS, |i| ops::embedding(&h.stream, &table, tokens.view(), None, rows, out[i].view()))?;
        self.line(&format!("embedding {rows} x {dim}"), seconds, (rows * dim * 6) as f64);
        Ok(())
    }

    fn sampling(&self, h: &mut Harness, vocab: usize, greedy: bool) -> Result<(), KernelError> {
        let rows = 192;
        let logits = h.random_f32(rows * vocab, 8.0);
        let logits = h.upload(&logits)?;
        let row = SamplingRow { temperature: 0.8, top_p: 0.95, top_k: 50, seed: 1, ..SamplingRow::default() };
        let params: Vec<SamplingRow> = (0..rows as u64)
            .map(|position| SamplingRow { position, temperature: if greedy { 0.0 } else { 0.8 }, ..row })
            .collect();
        let params = h.upload(&params)?;
        let tokens = h.poisoned::<u32>(rows)?;
        let seconds = h.seconds(4, |_| ops::sample(&h.stream, logits.view(), vocab, params.view(), tokens.view()))?;
        let what = if greedy { "greedy" } else { "0.8, k 50, p 0.95" };
        self.line(&format!("sample {rows} x {vocab}, {what}"), seconds, (rows * vocab * 4) as f64);
        Ok(())
    }

    fn product(&self, h: &mut Harness, rows: usize, n: usize, k: usize, adds: bool) -> Result<(), KernelError> {
        let sets = 4;
        let weights: Vec<Weight> =
            (0..sets).map(|_| Weight::new(random_bf16(h, n * k, 0.02)?, n, k)).collect::<Result<_, _>>()?;
        let x = random_bf16(h, rows * k, 1.0)?;
        let (out, sum) = (h.poisoned::<bf16>(rows * n)?, DeviceBuffer::<f32>::zeros(&h.context, "sum", rows * n)?);
        let out = match adds {
            false => Output::Bf16(out.view()),
            true => Output::F32(sum.view(), Accumulate::Add),
        };
        let out_bytes = if adds { 8 } else { 2 };
        for tuned in [false, true] {
            if tuned {
                h.blas.tune(&h.stream, x.view(), rows, &weights.iter().collect::<Vec<_>>(), out)?;
            }
            let seconds = h.seconds(sets, |i| h.blas.matmul(&h.stream, x.view(), rows, &weights[i], out))?;
            let (adds, tuned) = (if adds { ", added in f32" } else { "" }, if tuned { ", tuned" } else { "" });
            let what = format!("matmul {rows} x {k} by {n}{adds}{tuned}");
            self.line(&what, seconds, (n * k * 2 + rows * k * 2 + rows * n * out_bytes) as f64);
        }
        Ok(())
    }

    /// One row a sequence, `context` keys each; pages anywhere.
    fn decode(&self, h: &mut Harness, case: &Case, sequences: usize, context: usize) -> Result<(), KernelError> {
        let layout = case.layout(2);
        let blocks_each = context.div_ceil(case.chunk_tokens);
        let pool = filled_pool(h, case, 2, sequences * blocks_each)?;
        let mut table: Vec<BlockId> = (0..(sequences * blocks_each) as u32).map(BlockId).collect();
        table.shuffle(&mut h.rng);
        let entries: Vec<Entry> = (0..sequences)
            .map(|i| Entry {
                first_row: i as u32,
                num_rows: 1,
                first_position: context as u32 - 1,
                first_block: (i * blocks_each) as u32,
                num_blocks: blocks_each as u32,
            })
            .collect();
        let attention = Attention::new(&pool, case.num_heads, sequences)?;
        let uploaded = Uploaded::new(h, &table, &attention.plan(&entries))?;
        let len = sequences * case.num_heads * case.head_dim;
        let (q, out) = (random_bf16(h, len, 1.0)?, h.poisoned::<bf16>(len)?);
        let scale = 1.0 / (case.head_dim as f32).sqrt();
        let seconds = h.seconds(2, |layer| {
            attention.run(&h.stream, &pool, layer, q.view(), &uploaded.inputs(), sequences, scale, out.view())
        })?;
        let what = format!(
            "decode attention {sequences} x {context}, {}/{} heads of {}",
            case.num_heads, case.num_kv_heads, case.head_dim
        );
        let kv_bytes = sequences * context * 2 * layout.token_len() * 2;
        self.line(&what, seconds, (kv_bytes + 4 * len) as f64);
        Ok(())
    }
}

fn filled_pool(h: &mut Harness, case: &Case, layers: usize, blocks: usize) -> Result<CudaKvPool, KernelError> {
    let pool = CudaKvPool::new(&h.context, case.layout(layers), blocks)?;
    for layer in 0..layers {
        ops::fill_uniform(&h.stream, h.rng.random(), 1.0, pool.layer(layer)?)?;
    }
    Ok(pool)
}

/// A causal prompt of `rows` from nothing.
fn prefill(h: &mut Harness, case: &Case, rows: usize) -> Result<(), KernelError> {
    let blocks = rows.div_ceil(case.chunk_tokens);
    let pool = filled_pool(h, case, 1, blocks)?;
    let mut table: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
    table.shuffle(&mut h.rng);
    let entry =
        Entry { first_row: 0, num_rows: rows as u32, first_position: 0, first_block: 0, num_blocks: blocks as u32 };
    let attention = Attention::new(&pool, case.num_heads, 1)?;
    let uploaded = Uploaded::new(h, &table, &attention.plan(&[entry]))?;
    let len = rows * case.num_heads * case.head_dim;
    let (q, out) = (random_bf16(h, len, 1.0)?, h.poisoned::<bf16>(len)?);
    let scale = 1.0 / (case.head_dim as f32).sqrt();
    let seconds =
        h.seconds(2, |_| attention.run(&h.stream, &pool, 0, q.view(), &uploaded.inputs(), rows, scale, out.view()))?;
    // Two products of rows^2 / 2 keys each.
    let flops = 2.0 * (rows as f64).powi(2) * (case.num_heads * case.head_dim) as f64;
    println!(
        "prefill attention {rows}, {}/{} heads of {}: {:.1} us, {:.0} TFLOP/s",
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        seconds * 1e6,
        flops / seconds / 1e12
    );
    Ok(())
}

/// Products that arithmetic bounds.
fn products_rate(h: &mut Harness, rows: usize, n: usize, k: usize) -> Result<(), KernelError> {
    let weight = Weight::new(random_bf16(h, n * k, 0.02)?, n, k)?;
    let x = random_bf16(h, rows * k, 1.0)?;
    let out = h.poisoned::<bf16>(rows * n)?;
    let seconds = h.seconds(2, |_| h.blas.matmul(&h.stream, x.view(), rows, &weight, Output::Bf16(out.view())))?;
    let rate = 2.0 * rows as f64 * n as f64 * k as f64 / seconds / 1e12;
    println!("matmul {rows} x {k} by {n}: {:.1} us, {rate:.0} TFLOP/s", seconds * 1e6);
    Ok(())
}
