//! Checks and measures the CUDA layer on the GPU at hand; `tests/gpu/run` calls it.
//!
//! gpu_check parity [SEED]       every operation against the CPU's reference form, on random ragged inputs
//! gpu_check small [SEED]        the same with few and small cases, for compute-sanitizer
//! gpu_check copies              chunks between device and pinned memory, and a graph replayed
//! gpu_check times               kernels: medians, bytes, share of the device's copy bandwidth
//! gpu_check compile ARCH FOLDER fills a cubin folder for the shapes used here; needs NVRTC, no GPU
//!
//! KEEPSAKE_CUBINS names the folder of compiled kernels. Exits 1 if anything failed.

mod attention;
mod copies;
mod harness;
mod parity;
mod sampling;
mod times;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use keepsake_kernels::cuda::{default_cubin_folder, sources, Compiler, Context};
use keepsake_kernels::KernelError;

use harness::Harness;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["parity"] => on_gpu(1, false, parity::run),
        ["parity", seed] => on_gpu(seed.parse().unwrap_or(1), false, parity::run),
        ["small"] => on_gpu(1, true, parity::run),
        ["small", seed] => on_gpu(seed.parse().unwrap_or(1), true, parity::run),
        ["copies"] => on_gpu(1, false, copies::run),
        ["times"] => on_gpu(1, false, times::run),
        ["compile", arch, folder] => compile(arch, Path::new(folder)),
        _ => {
            eprintln!("usage: gpu_check parity|small|copies|times|compile ARCH FOLDER");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn on_gpu(
    seed: u64,
    is_small: bool,
    run: impl FnOnce(&mut Harness) -> Result<(), KernelError>,
) -> Result<bool, KernelError> {
    let folder = std::env::var_os("KEEPSAKE_CUBINS").map(PathBuf::from).or_else(default_cubin_folder);
    let start = std::time::Instant::now();
    let context = Context::open(0, folder.as_deref())?;
    println!("{}; opened in {:.2} s; seed {seed}", context.describe(), start.elapsed().as_secs_f64());
    let mut harness = Harness::new(context, seed, is_small)?;
    run(&mut harness)?;
    Ok(harness.report())
}

fn compile(arch: &str, folder: &Path) -> Result<bool, KernelError> {
    let compiler = Compiler::new(arch.to_owned(), Some(folder.to_owned()))?;
    for source in &sources::GENERAL {
        compiler.cubin(source, &[])?;
    }
    let prefill = match arch {
        "sm_90a" => &sources::ATTENTION_PREFILL_HOPPER,
        _ => &sources::ATTENTION_PREFILL,
    };
    for case in attention::CASES.iter().chain(&attention::TIMED) {
        for source in [&sources::ATTENTION_DECODE, prefill] {
            compiler.cubin(source, &case.defines())?;
        }
    }
    Ok(true)
}
