//! The processor's kernels: a reference form, and fast forms by instruction set.
//!
//! May depend on the crate's types only through the raw parts that `ops` hands over after it checked shapes. Kernels of
//! floats are written once over `simd::Simd`; products with quantised weights have one form for each instruction set.

pub(crate) mod attention;
pub(crate) mod blocks;
pub(crate) mod elementwise;
pub(crate) mod floats;
pub(crate) mod integers;
pub(crate) mod isa;
pub(crate) mod memory;
pub(crate) mod norm;
pub(crate) mod panels;
pub(crate) mod quantise;
pub(crate) mod reference;
pub(crate) mod rope;
pub(crate) mod simd;
pub(crate) mod team;
