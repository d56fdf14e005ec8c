//! The processor's kernels: a reference form, and fast forms by instruction set.
//!
//! May depend on the crate's types only through the raw parts that `ops` hands over after it checked shapes. Kernels of
//! floats are written once over `simd::Simd`; products with quantised weights have one form for each instruction set.
//!
//! # Floors, for the demo model (SmolLM2-135M: 106 M weights of 5 bits in layers, 28 M of 8.5 bits in the table)
//! - Decode of one stream reads 97 MB and does 135 M multiply-adds. Memory binds: 15 GB/s for one core of a Sapphire
//!   Rapids server is 6.5 ms; the byte dot products need 30 cycles for 512 weights (320 bytes), 2.4 ms.
//! - Prefill of 512 does 54 G multiply-adds of weights: four int8 tile products for each, 256 a cycle at most, 62 ms on
//!   one core at 3.4 GHz; and 5 G of attention in f32, 32 a cycle at most, 45 ms.
//! - Eight streams add 8 x 135 M multiply-adds to the same 97 MB: expanding weights to byte planes, 100 cycles for 1,024
//!   of them, hides the tile products and binds at 4 ms; below what memory takes.

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
