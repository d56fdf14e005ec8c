//! Rates of the forward pass: prefill of 512 tokens, decode of one stream and of eight at a context
//! of about 256. `cargo bench -p keepsake-model --bench forward [-- MODEL] [-- --threads N]`, where
//! MODEL is a path or the name of a generated shape; the default is the demo model.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use keepsake_kernels::{BlockId, Device, DeviceKind, Entry, KvPool};
use keepsake_model::{load, Batch, Model, ModelSource, Runner};

const CHUNK_TOKENS: usize = 32;
const PREFILL: usize = 512;
const CONTEXT: usize = 256;
const STREAMS: usize = 8;
/// Each figure is the median of as many runs as fit into this, at least three.
const TIME_EACH: Duration = Duration::from_secs(4);
/// A turn of so many new tokens after a long past, beside the same on an empty history.
const TURN: usize = 20;
const PAST: usize = 1500;
const BLOCKS_EACH: usize = (PAST + TURN).div_ceil(CHUNK_TOKENS);

fn main() {
    let (source, threads) = arguments();
    let device = Device::open(DeviceKind::Auto, threads).expect("the processor is always there");
    let started = Instant::now();
    let model = load(&source, &device).unwrap_or_else(|error| panic!("{error}"));
    println!(
        "{} on {}: loaded in {:.2} s, weights {:.1} MB",
        model.name(),
        device.describe(),
        started.elapsed().as_secs_f64(),
        model.weight_bytes() as f64 / 1e6
    );
    let model = Arc::new(model);
    let mut bench = Bench::new(&model, &device);
    bench.report("prefill of 512, one stream", PREFILL, |bench| bench.step(0..1, 0, PREFILL));
    bench.report(&format!("{TURN} rows at 0"), TURN, |bench| bench.step(0..1, 0, TURN));
    for start in (0..PAST).step_by(500) {
        bench.step(0..1, start, 500);
    }
    bench.report(&format!("{TURN} rows at {PAST}"), TURN, |bench| bench.step(0..1, PAST, TURN));
    bench.step(0..STREAMS, 0, CONTEXT / STREAMS);
    for stream in 0..STREAMS {
        bench.step(stream..stream + 1, 0, CONTEXT);
    }
    for streams in [1, STREAMS] {
        let mut position = CONTEXT;
        bench.report(&format!("decode at 256, {streams} stream(s)"), streams, |bench| {
            bench.step(0..streams, position, 1);
            // Around the context, so that the rate is of one context length.
            position = CONTEXT + (position + 1 - CONTEXT) % 64;
        });
    }
}

fn arguments() -> (ModelSource, usize) {
    let mut source = None;
    let mut threads = 0;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo passes it to every bench.
            "--bench" => {}
            "--threads" => {
                let count = arguments.next().and_then(|count| count.parse().ok());
                threads = count.expect("--threads takes a number");
            }
            name if Path::new(name).exists() => {
                let detected = ModelSource::detect(Path::new(name));
                source = Some(detected.unwrap_or_else(|error| panic!("{error}")));
            }
            name => source = Some(ModelSource::Dummy(name.to_owned())),
        }
    }
    let demo = keepsake_config::data_dir().join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let source = source.unwrap_or_else(|| match demo.exists() {
        true => ModelSource::Gguf(demo),
        false => ModelSource::Dummy("smollm2-135m".to_owned()),
    });
    (source, threads)
}

struct Bench {
    runner: Runner,
    vocab_size: usize,
}

impl Bench {
    fn new(model: &Arc<Model>, device: &Device) -> Self {
        let layout = model.kv_layout(CHUNK_TOKENS);
        let pool = KvPool::new(device, layout, STREAMS * BLOCKS_EACH).expect("memory for K/V");
        let runner = Runner::new(model.clone(), device.clone(), Arc::new(pool), PREFILL);
        Self { runner: runner.expect("memory for activations"), vocab_size: model.hparams.vocab_size }
    }

    /// `count` tokens from `position` on, of each stream, sampling the last.
    fn step(&mut self, streams: std::ops::Range<usize>, position: usize, count: usize) {
        let mut batch = Batch::default();
        for stream in streams {
            let first_block = stream * BLOCKS_EACH;
            batch.entries.push(Entry {
                first_row: batch.tokens.len() as u32,
                num_rows: count as u32,
                first_position: position as u32,
                first_block: batch.block_table.len() as u32,
                num_blocks: BLOCKS_EACH as u32,
            });
            let blocks = first_block..first_block + BLOCKS_EACH;
            batch.block_table.extend(blocks.map(|block| BlockId(block as u32)));
            for position in position..position + count {
                let token = (position * 7919 + stream * 104_729) % self.vocab_size;
                batch.tokens.push(token as u32);
                batch.positions.push(position as u32);
                batch.slots.push((first_block * CHUNK_TOKENS + position) as u32);
            }
            batch.sample_rows.push(batch.tokens.len() as u32 - 1);
        }
        self.runner.forward(&batch).expect("a sound batch");
    }

    fn report(&mut self, name: &str, num_tokens: usize, mut run: impl FnMut(&mut Self)) {
        run(self);
        let mut times = Vec::new();
        let started = Instant::now();
        while times.len() < 3 || started.elapsed() < TIME_EACH {
            let begin = Instant::now();
            run(self);
            times.push(begin.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{name}: {:.1} tok/s (median of {}, {:.3} ms a step, best {:.3} ms)",
            num_tokens as f64 / median,
            times.len(),
            median * 1e3,
            times[0] * 1e3
        );
    }
}
