//! Whole forward passes on the GPU at hand; `tests/gpu/run` calls it.
//!
//! gpu_model parity              every architecture with generated weights: logits against the CPU's, prefill and decode
//! gpu_model folders FOLDER...   Hugging Face folders with tokens.json and logits.bin (f32): logits against those
//! gpu_model golden GGUF JSON    the demo model against another implementation's logits (model/tests/fixtures/logits.json)
//! gpu_model times SHAPE         loading, decode and prefill steps of a generated shape (`llama2-13b:bf16`)
//! gpu_model compile ARCH FOLDER fills a cubin folder for these models; needs NVRTC, no GPU
//!
//! Exits 1 if anything failed.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use keepsake_kernels::cuda::ops::SamplingRow;
use keepsake_kernels::cuda::{sources, Compiler, Copies, Event, HostPage, Method, PinnedBuffer, Stream};
use keepsake_kernels::{BlockId, Device, DeviceKind, Entry, KvPool};
use keepsake_model::{load, Batch, Model, ModelSource, Runner};

type Outcome = Result<bool, Box<dyn std::error::Error>>;

const CHUNK_TOKENS: usize = 32;
/// Largest |gpu - reference| / |reference| over a step's logits of a model of three layers.
const TOLERANCE: f64 = 1e-2;
/// Roundings to bf16 add up over layers: smollm2-135m has thirty.
const PARITY_SHAPES: [(&str, f64); 4] = [
    ("smollm2-135m:bf16", 2e-2),
    ("tiny-qwen2:bf16", TOLERANCE),
    ("tiny-qwen3:bf16", TOLERANCE),
    ("tiny-opt:bf16", TOLERANCE),
];
/// (HEAD_DIM, GROUP) of the shapes here.
const COMPILED: [(usize, usize); 5] = [(64, 3), (64, 2), (128, 2), (64, 1), (128, 4)];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["parity"] => parity(),
        ["folders", folders @ ..] => against_folders(folders),
        ["golden", model, logits] => golden(Path::new(model), Path::new(logits)),
        ["times", shape] => times(shape),
        ["compile", arch, folder] => compile(arch, Path::new(folder)),
        _ => {
            eprintln!(
                "usage: gpu_model parity | folders FOLDER... | golden GGUF JSON | times SHAPE | compile ARCH FOLDER"
            );
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu_model: {error}");
            ExitCode::FAILURE
        }
    }
}

fn gpu() -> Result<Device, Box<dyn std::error::Error>> {
    Ok(match std::env::var_os("KEEPSAKE_CUBINS") {
        Some(folder) => Device::open_cuda(0, 0, Some(Path::new(&folder)))?,
        None => Device::open(DeviceKind::Cuda, 0)?,
    })
}

/// Sequences in a pool of their own.
struct Driver {
    runner: Runner,
    pool: Arc<KvPool>,
    vocab_size: usize,
    blocks_each: usize,
}

impl Driver {
    fn new(
        source: &ModelSource,
        device: &Device,
        sequences: usize,
        tokens: usize,
        max_rows: usize,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let model = Arc::new(load(source, device)?);
        Driver::with(model, device, sequences, tokens, max_rows)
    }

    fn with(
        model: Arc<Model>,
        device: &Device,
        sequences: usize,
        tokens: usize,
        max_rows: usize,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let blocks_each = tokens.div_ceil(CHUNK_TOKENS);
        let pool = Arc::new(KvPool::new(device, model.kv_layout(CHUNK_TOKENS), sequences * blocks_each)?);
        let vocab_size = model.hparams.vocab_size;
        let runner = Runner::new(model, device.clone(), pool.clone(), max_rows)?;
        Ok(Self { runner, pool, vocab_size, blocks_each })
    }

    /// Parts of sequences: (sequence, first position, tokens). Every row is sampled, or the last of each part.
    fn batch(&self, parts: &[(usize, usize, Vec<u32>)], every_row: bool) -> Batch {
        let mut batch = Batch::default();
        for (sequence, first, tokens) in parts {
            batch.entries.push(Entry {
                first_row: batch.tokens.len() as u32,
                num_rows: tokens.len() as u32,
                first_position: *first as u32,
                first_block: batch.block_table.len() as u32,
                num_blocks: self.blocks_each as u32,
            });
            // Scattered, so that no block lies where its index says.
            let block = |index: usize| (sequence + (self.blocks_each - 1 - index) * self.num_sequences()) as u32;
            batch.block_table.extend((0..self.blocks_each).map(|index| BlockId(block(index))));
            for (i, &token) in tokens.iter().enumerate() {
                let position = first + i;
                batch.tokens.push(token);
                batch.positions.push(position as u32);
                batch
                    .slots
                    .push(block(position / CHUNK_TOKENS) * CHUNK_TOKENS as u32 + (position % CHUNK_TOKENS) as u32);
                if every_row || i + 1 == tokens.len() {
                    batch.sample_rows.push(batch.tokens.len() as u32 - 1);
                }
            }
        }
        batch
    }

    fn num_sequences(&self) -> usize {
        self.runner.num_blocks() / self.blocks_each
    }

    fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
        let logits = self.runner.forward(batch)?;
        Ok((0..logits.num_rows()).flat_map(|row| logits.row(row).to_vec()).collect())
    }
}

fn tokens(seed: usize, count: usize, vocab_size: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729 + i * i * 31) % vocab_size) as u32).collect()
}

/// |got - want| / |want|; NaN if an element is NaN.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| (f64::from(g) - f64::from(w)).powi(2)).sum();
    let size: f64 = want.iter().map(|&w| f64::from(w).powi(2)).sum();
    (error / size.max(1e-30)).sqrt()
}

fn argmax(row: &[f32]) -> u32 {
    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
    best.unwrap_or(0) as u32
}

/// NaN does not pass.
fn passes(what: &str, error: f64, tolerance: f64) -> bool {
    let passed = error <= tolerance;
    println!("{} {what}: error {error:.2e}, tolerance {tolerance:.0e}", if passed { "ok    " } else { "FAILED" });
    passed
}

fn parity() -> Outcome {
    let gpu = gpu()?;
    let cpu = Device::open(DeviceKind::Cpu, 0)?;
    println!("{} against {}", gpu.describe(), cpu.describe());
    let mut passed = true;
    for (shape, tolerance) in PARITY_SHAPES {
        let source = ModelSource::Dummy(shape.to_owned());
        let mut on_gpu = Driver::new(&source, &gpu, 8, 256, 400)?;
        let mut on_cpu = Driver::new(&source, &cpu, 8, 256, 400)?;
        let vocab_size = on_gpu.vocab_size;
        // Prompts of several lengths at once, then one that goes on beside decoding ones.
        let lengths = [1, 5, 31, 32, 33, 90, 64, 100];
        let prompt = |s: usize| (s, 0, tokens(s, lengths[s], vocab_size));
        let prompts: Vec<_> = (0..7).map(prompt).collect();
        let mut mixed = vec![(7, 0, tokens(7, 60, vocab_size))];
        mixed.extend((0..7).map(|s| (s, lengths[s], tokens(s + 50, 1 + (s == 2) as usize * 20, vocab_size))));
        for (what, parts, every_row) in [("prefill", &prompts, true), ("mixed", &mixed, false)] {
            let batch = on_gpu.batch(parts, every_row);
            let (got, want) = (on_gpu.logits(&batch)?, on_cpu.logits(&batch)?);
            passed &= passes(&format!("{shape} {what}"), relative_error(&got, &want), tolerance);
        }
        // Decode steps: the first of a bucket runs eagerly and is captured, later ones replay; sampled on the device too.
        for step in 0..4 {
            let parts: Vec<_> = [0, 1, 3, 4, 5]
                .into_iter()
                .map(|s| (s, lengths[s] + 1 + step, tokens(step + s, 1, vocab_size)))
                .collect();
            let batch = on_gpu.batch(&parts, true);
            let (got, want) = (on_gpu.logits(&batch)?, on_cpu.logits(&batch)?);
            passed &= passes(&format!("{shape} decode {step}"), relative_error(&got, &want), tolerance);
            let greedy = vec![SamplingRow { top_p: 1.0, ..SamplingRow::default() }; parts.len()];
            on_gpu.runner.submit(&batch, &greedy, &[], &[])?;
            let drawn = on_gpu.runner.collect()?;
            let best: Vec<u32> = got.chunks(vocab_size).map(argmax).collect();
            if drawn != best {
                println!("FAILED {shape} decode {step}: the device chose {drawn:?}, the logits say {best:?}");
                passed = false;
            }
        }
        passed &= two_in_flight(&mut on_gpu, shape)?;
        passed &= swapped_out_and_in(&mut on_gpu, shape)?;
    }
    Ok(passed)
}

/// The same greedy decode twice: step by step, and with each step enqueued before the tokens of the one before are known.
fn two_in_flight(driver: &mut Driver, shape: &str) -> Outcome {
    let vocab_size = driver.vocab_size;
    let (rows, steps, start) = (3, 8, 120);
    let greedy = vec![SamplingRow { top_p: 1.0, ..SamplingRow::default() }; rows];
    let prompt: Vec<_> = (0..rows).map(|s| (s, 0, tokens(s + 9, start, vocab_size))).collect();
    let mut runs = Vec::new();
    for overlaps in [false, true] {
        let prompt = driver.batch(&prompt, false);
        driver.runner.submit(&prompt, &greedy, &[], &[])?;
        let mut drawn = Vec::new();
        if !overlaps {
            drawn.push(driver.runner.collect()?);
        }
        for step in 0..steps {
            let token = |row: usize| drawn.last().filter(|_| !overlaps).map_or(0, |last: &Vec<u32>| last[row]);
            let parts: Vec<_> = (0..rows).map(|s| (s, start + step, vec![token(s)])).collect();
            let batch = driver.batch(&parts, true);
            let fed: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row, row)).collect();
            driver.runner.submit(&batch, &greedy, if overlaps { &fed } else { &[] }, &[])?;
            drawn.push(driver.runner.collect()?);
        }
        if overlaps {
            drawn.push(driver.runner.collect()?);
        }
        runs.push(drawn);
    }
    let passed = runs[0] == runs[1];
    println!("{} {shape}: two steps in flight draw the same tokens as one", if passed { "ok    " } else { "FAILED" });
    Ok(passed)
}

/// A step whose K/V was swapped out to pinned memory, overwritten with NaN and is still on its way back, layer by layer, when
/// the step is enqueued.
fn swapped_out_and_in(driver: &mut Driver, shape: &str) -> Outcome {
    let (vocab_size, start) = (driver.vocab_size, 120);
    let greedy = [SamplingRow { top_p: 1.0, ..SamplingRow::default() }];
    let prompt = driver.batch(&[(1, 0, tokens(77, start, vocab_size))], false);
    let next = driver.batch(&[(1, start, tokens(78, 1, vocab_size))], true);
    driver.runner.submit(&prompt, &greedy, &[], &[])?;
    driver.runner.submit(&next, &greedy, &[], &[])?;
    driver.runner.collect()?;
    let want = driver.runner.collect()?;
    let want_logits = driver.logits(&next)?;

    let pool = driver.pool.clone();
    let pool = pool.cuda().expect("the pool is on the GPU");
    let layout = *pool.layout();
    let blocks: Vec<BlockId> = next.block_table[..start / CHUNK_TOKENS].to_vec();
    let slab = PinnedBuffer::<u8>::new(pool.context(), "a slab", blocks.len() * layout.chunk_bytes())?;
    let page = |(index, &block): (usize, &BlockId)| HostPage { block, offset: index * layout.chunk_bytes() };
    let pages: Vec<HostPage> = blocks.iter().enumerate().map(page).collect();
    let copies = Copies::new(Stream::new(pool.context())?, Method::Batch);
    let events: Vec<Event> = (0..layout.num_layers).map(|_| Event::new(pool.context())).collect::<Result<_, _>>()?;
    let mut passed = true;
    for round in 0..3 {
        // Collecting has waited for the steps that wrote the blocks.
        copies.swap_out(pool, &slab, &pages, &[])?;
        pool.poison(copies.stream(), &blocks)?;
        if round == 0 {
            copies.stream().synchronize()?;
            passed &= driver.logits(&next)?.iter().all(|logit| logit.is_nan());
        }
        copies.swap_in(pool, &slab, &pages, &events)?;
        driver.runner.submit(&next, &greedy, &[], &events)?;
        passed &= driver.runner.collect()? == want;
        copies.stream().synchronize()?;
    }
    passed &= driver.logits(&next)? == want_logits;
    let word = if passed { "ok    " } else { "FAILED" };
    println!(
        "{word} {shape}: swapped out, overwritten, swapped in layer by layer beside the step: same token, same logits"
    );
    Ok(passed)
}

fn against_folders(folders: &[&str]) -> Outcome {
    let gpu = gpu()?;
    let cpu = Device::open(DeviceKind::Cpu, 0)?;
    let mut passed = true;
    for folder in folders {
        let path = Path::new(folder);
        let ids: Vec<u32> = std::fs::read_to_string(path.join("tokens.txt"))?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let want: Vec<f32> = std::fs::read(path.join("logits.bin"))?
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let source = ModelSource::detect(path)?;
        for (name, device) in [("gpu", &gpu), ("cpu", &cpu)] {
            let mut driver = Driver::new(&source, device, 1, ids.len(), ids.len())?;
            let batch = driver.batch(&[(0, 0, ids.clone())], true);
            let got = driver.logits(&batch)?;
            passed &= passes(&format!("{folder} on the {name}"), relative_error(&got, &want), TOLERANCE);
        }
    }
    Ok(passed)
}

#[derive(serde::Deserialize)]
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

/// The golden logits are of quantised weights in f32 arithmetic; the GPU's are of the same weights rounded to bf16.
fn golden(model: &Path, logits: &Path) -> Outcome {
    /// Under this margin another rounding may choose the other token.
    const CLEAR_MARGIN: f32 = 0.5;
    /// Over the five best logits of each position: large ones, so less than over all.
    const GOLDEN_TOLERANCE: f64 = 1e-2;
    let gpu = gpu()?;
    let model = Arc::new(load(&ModelSource::detect(model)?, &gpu)?);
    let cases: Vec<Golden> = serde_json::from_str(&std::fs::read_to_string(logits)?)?;
    let mut passed = !cases.is_empty();
    for case in cases {
        let mut ids = case.tokens.clone();
        ids.extend(&case.greedy);
        let mut driver = Driver::with(model.clone(), &gpu, 1, ids.len(), ids.len())?;
        let batch = driver.batch(&[(0, 0, ids.clone())], true);
        let got = driver.logits(&batch)?;
        let row = |position: usize| &got[position * driver.vocab_size..(position + 1) * driver.vocab_size];
        let prompt = case.prompt_top5.iter().enumerate().map(|(i, top)| (i * case.prompt_top5_every, top));
        let first_reply = case.tokens.len() - 1;
        let reply = case.greedy_top5.iter().enumerate().map(|(i, top)| (first_reply + i, top));
        let (mut at, mut want) = (Vec::new(), Vec::new());
        for (position, top) in prompt.chain(reply) {
            at.extend(top.iter().map(|&(token, _)| row(position)[token]));
            want.extend(top.iter().map(|&(_, logit)| logit));
        }
        let worst = at.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        let same = case.greedy.iter().enumerate().filter(|(i, &token)| argmax(row(first_reply + i)) == token).count();
        let unclear = case.greedy_margin.iter().filter(|&&margin| margin < CLEAR_MARGIN).count();
        let (name, total) = (&case.name, case.greedy.len());
        let what = format!("golden {name}: {same} of {total} greedy tokens ({unclear} unclear), worst {worst:.2}");
        passed &= passes(&what, relative_error(&at, &want), GOLDEN_TOLERANCE) && same + unclear >= total;
    }
    Ok(passed)
}

fn times(shape: &str) -> Outcome {
    let start = Instant::now();
    let gpu = gpu()?;
    println!("{}; opened in {:.2} s", gpu.describe(), start.elapsed().as_secs_f64());
    let model = Arc::new(load(&ModelSource::Dummy(shape.to_owned()), &gpu)?);
    let weight_bytes = model.weight_bytes() as f64;
    println!("{shape}: {:.1} GB of weights loaded after {:.2} s", weight_bytes / 1e9, start.elapsed().as_secs_f64());
    let (sequences, context) = (192, 608);
    let mut driver = Driver::with(model.clone(), &gpu, sequences, context + 32, 2048)?;
    let vocab_size = driver.vocab_size;
    let first = driver.batch(&[(0, 0, tokens(0, 10, vocab_size))], false);
    driver.logits(&first)?;
    println!("first token after {:.2} s", start.elapsed().as_secs_f64());
    for rows in [1, 16, 64, 128, 192] {
        let parts: Vec<_> = (0..rows).map(|s| (s, context, tokens(s, 1, vocab_size))).collect();
        let batch = driver.batch(&parts, true);
        let row = SamplingRow { temperature: 0.8, top_p: 0.95, top_k: 50, seed: 1, ..SamplingRow::default() };
        let sampling: Vec<SamplingRow> = (0..rows as u64).map(|position| SamplingRow { position, ..row }).collect();
        let seconds = median(|| {
            driver.runner.submit(&batch, &sampling, &[], &[])?;
            driver.runner.collect().map(|_| ())
        })?;
        // The next step is enqueued while one runs; its tokens are what that one draws.
        let fed: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row, row)).collect();
        driver.runner.submit(&batch, &sampling, &[], &[])?;
        let overlapped = median(|| {
            driver.runner.submit(&batch, &sampling, &fed, &[])?;
            driver.runner.collect().map(|_| ())
        })?;
        driver.runner.collect()?;
        let kv_bytes = rows * context * 2 * model.hparams.kv_dim() * 2 * model.hparams.num_layers;
        let rate = (weight_bytes + kv_bytes as f64) / seconds / 1e9;
        println!(
            "decode {rows} x {context}, sampled: {:.2} ms, {rate:.0} GB/s of weights and K/V; {:.2} ms with two in flight",
            seconds * 1e3,
            overlapped * 1e3
        );
    }
    for rows in [256, 512, 2048] {
        let parts: Vec<_> = (0..rows / 256).map(|s| (s, 0, tokens(s, 256, vocab_size))).collect();
        let batch = driver.batch(&parts, false);
        let seconds = median(|| driver.runner.forward(&batch).map(|_| ()))?;
        let flops = 2.0 * weight_bytes / 2.0 * rows as f64;
        println!("prefill {rows}: {:.2} ms, {:.0} TFLOP/s of products", seconds * 1e3, flops / seconds / 1e12);
    }
    Ok(true)
}

fn median<E>(mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let mut seconds = Vec::new();
    for round in 0..25 {
        let start = Instant::now();
        run()?;
        if round >= 5 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

fn compile(arch: &str, folder: &Path) -> Outcome {
    let compiler = Compiler::new(arch.to_owned(), Some(folder.to_owned()))?;
    for source in &sources::GENERAL {
        compiler.cubin(source, &[])?;
    }
    let prefill = match arch {
        "sm_90a" => &sources::ATTENTION_PREFILL_HOPPER,
        _ => &sources::ATTENTION_PREFILL,
    };
    for (head_dim, group) in COMPILED.into_iter().chain([(128, 1)]) {
        let defines = [("HEAD_DIM", head_dim), ("GROUP", group), ("CHUNK_TOKENS", CHUNK_TOKENS)];
        for source in [&sources::ATTENTION_DECODE, prefill] {
            compiler.cubin(source, &defines)?;
        }
    }
    Ok(true)
}
