//! Random inputs, the table of tolerances, and what came out.

use std::sync::Arc;

use half::bf16;
use keepsake_kernels::cuda::{Blas, Context, DeviceBuffer, Event, Graph, Stream, View};
use keepsake_kernels::{Device, Isa, KernelError};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Largest relative error, |out - want| / |want| over all elements. Rounding to bf16 changes an element by up to 2^-8 =
/// 3.9e-3 of itself, 1.7e-3 in the mean square of many. What sums over bf16 operands in f32 adds nothing visible; what reads a bf16 intermediate adds one
/// rounding.
pub const TOLERANCES: [(&str, f64); 13] = [
    ("embedding", 0.0),
    ("gather_rows", 0.0),
    ("rms_norm", 4e-3),
    ("layer_norm", 4e-3),
    ("silu_mul", 4e-3),
    ("bias_activate", 4e-3),
    ("add_bias", 1e-6),
    ("rope q", 4e-3),
    ("rope k v", 4e-3),
    ("matmul bf16", 4e-3),
    ("matmul f32", 1e-4),
    // P is rounded to bf16 before it meets V.
    ("attention", 6e-3),
    ("fill_uniform", 0.0),
];

pub struct Harness {
    pub context: Arc<Context>,
    pub stream: Stream,
    pub blas: Blas,
    /// What the operations mean.
    pub reference: Device,
    pub rng: StdRng,
    pub is_small: bool,
    errors: Vec<(String, usize, f64)>,
    failures: Vec<String>,
}

impl Harness {
    pub fn new(context: Arc<Context>, seed: u64, is_small: bool) -> Result<Harness, KernelError> {
        Ok(Harness {
            stream: Stream::new(&context)?,
            blas: Blas::new(&context)?,
            reference: Device::open_cpu(0, Isa::Reference)?,
            context,
            rng: StdRng::seed_from_u64(seed),
            is_small,
            errors: Vec::new(),
            failures: Vec::new(),
        })
    }

    /// bf16 values in -scale..scale.
    pub fn random(&mut self, len: usize, scale: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32((self.rng.random::<f32>() - 0.5) * 2.0 * scale)).collect()
    }

    /// As [`Harness::random`], f32.
    pub fn random_f32(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| (self.rng.random::<f32>() - 0.5) * 2.0 * scale).collect()
    }

    pub fn upload<T: keepsake_kernels::cuda::Element>(&self, values: &[T]) -> Result<DeviceBuffer<T>, KernelError> {
        DeviceBuffer::from_slice(&self.context, "a test's input", values)
    }

    /// An output full of NaN, so that what was not written shows.
    pub fn poisoned<T: keepsake_kernels::cuda::Element>(&self, len: usize) -> Result<DeviceBuffer<T>, KernelError> {
        let buffer = DeviceBuffer::new(&self.context, "a test's output", len)?;
        self.stream.fill_bytes(buffer.view(), 0xff)?;
        Ok(buffer)
    }

    pub fn read_bf16(&self, view: View<bf16>) -> Result<Vec<f32>, KernelError> {
        Ok(self.stream.read(view)?.into_iter().map(bf16::to_f32).collect())
    }

    /// Compares with the reference and keeps the worst error of the operation.
    pub fn compare(&mut self, op: &str, case: &str, got: &[f32], want: &[f32]) {
        let tolerance = TOLERANCES.iter().find(|(name, _)| *name == op).expect("every operation is in the table").1;
        let error = relative_error(got, want);
        match self.errors.iter_mut().find(|(name, _, _)| name == op) {
            Some((_, cases, worst)) => {
                *cases += 1;
                if error.is_nan() || error > *worst {
                    *worst = error;
                }
            }
            None => self.errors.push((op.to_owned(), 1, error)),
        }
        if error.is_nan() || error > tolerance {
            self.fail(format!("{op} ({case}): error {error:.2e} over {tolerance:.0e}"));
        }
    }

    pub fn fail(&mut self, what: String) {
        println!("FAILED {what}");
        self.failures.push(what);
    }

    /// Prints the table; true if nothing failed.
    pub fn report(&self) -> bool {
        if !self.errors.is_empty() {
            println!("{:<16} {:>6} {:>10} {:>10}", "operation", "cases", "worst", "tolerance");
        }
        for (op, cases, worst) in &self.errors {
            let tolerance = TOLERANCES.iter().find(|(name, _)| name == op).map_or(0.0, |(_, tolerance)| *tolerance);
            println!("{op:<16} {cases:>6} {worst:>10.2e} {tolerance:>10.0e}");
        }
        match self.failures.len() {
            0 => println!("ok"),
            n => println!("{n} FAILED"),
        }
        self.failures.is_empty()
    }

    /// Seconds of one of `count` operations: the median of 25 replays of a graph that holds them all, after 5 to warm up.
    pub fn seconds(
        &self,
        count: usize,
        mut enqueue: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        for i in 0..count {
            enqueue(i)?;
        }
        self.stream.synchronize()?;
        let graph = Graph::capture(&self.stream, || (0..count).try_for_each(&mut enqueue))?;
        let seconds = self.median(|| graph.launch(&self.stream))?;
        Ok(seconds / count as f64)
    }

    /// The median of 25 runs on the stream, after 5 to warm up.
    pub fn median(&self, mut run: impl FnMut() -> Result<(), KernelError>) -> Result<f64, KernelError> {
        let (start, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        let mut seconds = Vec::new();
        for round in 0..30 {
            self.stream.record(&start)?;
            run()?;
            self.stream.record(&end)?;
            end.synchronize()?;
            if round >= 5 {
                seconds.push(start.seconds_to(&end)?);
            }
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }
}

/// |got - want| / |want|; NaN if an element is NaN.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |value: f64| value * value;
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    let size: f64 = want.iter().map(|&w| square(f64::from(w))).sum();
    (error / size.max(1e-30)).sqrt()
}
