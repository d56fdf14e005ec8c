//! Every GPU kernel compiles for Ampere and Hopper, without a GPU; registers and spills are printed.
//!
//! `make nvrtc` fetches the compiler. Where it is missing, the test says that it was skipped.

#![cfg(feature = "cuda")]

use keepsake_kernels::cuda::sources::{self, Source};
use keepsake_kernels::cuda::Compiler;

/// (HEAD_DIM, GROUP, CHUNK_TOKENS) of the attention kernels: each head dimension, groups of real models.
const SHAPES: [(usize, usize, usize); 7] =
    [(64, 3, 32), (80, 1, 32), (96, 1, 16), (128, 1, 32), (128, 4, 32), (128, 8, 64), (256, 2, 32)];

#[test]
fn kernels_compile_for_ampere() {
    compile_all("sm_80", &[&sources::ATTENTION_DECODE, &sources::ATTENTION_PREFILL]);
}

#[test]
fn kernels_compile_for_hopper() {
    compile_all("sm_90a", &[&sources::ATTENTION_DECODE, &sources::ATTENTION_PREFILL_HOPPER]);
}

fn compile_all(arch: &str, attention: &[&'static Source]) {
    let compiler = match Compiler::new(arch.to_owned(), None) {
        Ok(compiler) => compiler,
        Err(error) => {
            eprintln!("SKIPPED kernels for {arch}: {error}");
            return;
        }
    };
    for source in &sources::GENERAL {
        compile(&compiler, source, &[]);
    }
    for (head_dim, group, chunk_tokens) in SHAPES {
        let defines = [("HEAD_DIM", head_dim), ("GROUP", group), ("CHUNK_TOKENS", chunk_tokens)];
        for source in attention {
            compile(&compiler, source, &defines);
        }
    }
}

fn compile(compiler: &Compiler, source: &Source, defines: &[(&str, usize)]) {
    let compiled = compiler.compile(source, defines).unwrap_or_else(|error| panic!("{error}"));
    assert!(compiled.cubin.starts_with(b"\x7fELF"), "{}: no machine code", source.name);
    let shape: Vec<String> = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    for kernel in resources(&compiled.log) {
        eprintln!("{} {} {}: {kernel}", compiler.arch(), source.name, shape.join(" "));
    }
}

/// One line a kernel from the assembler's report.
fn resources(log: &str) -> Vec<String> {
    let mut kernels = Vec::new();
    let mut name = "";
    let mut spills = "";
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default();
        } else if line.contains("spill stores") {
            spills = line.trim_start_matches("ptxas").trim_start_matches(['.', ' ']).trim();
        } else if let Some(used) = line.split("Used ").nth(1) {
            kernels.push(format!("{name}: {used}; {spills}"));
        }
    }
    kernels
}
