//! The kernels' sources, embedded in the binary.

/// One compilation unit: NVRTC sees the common part and the file as one text, so it needs no header.
#[derive(Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
}

/// What every model needs.
pub static GENERAL: [Source; 6] = [
    Source { name: "norm", text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/norm.cu")) },
    Source {
        name: "elementwise",
        text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/elementwise.cu")),
    },
    Source { name: "rows", text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/rows.cu")) },
    Source { name: "rope", text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/rope.cu")) },
    Source { name: "copy", text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/copy.cu")) },
    Source { name: "sampling", text: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/sampling.cu")) },
];

/// Compiled for a shape: macros HEAD_DIM, GROUP and CHUNK_TOKENS.
pub static ATTENTION_DECODE: Source = Source {
    name: "attention_decode",
    text: concat!(include_str!("kernels/attention_common.cuh"), include_str!("kernels/attention_decode.cu")),
};

/// As [`ATTENTION_DECODE`].
pub static ATTENTION_PREFILL: Source = Source {
    name: "attention_prefill",
    text: concat!(include_str!("kernels/attention_common.cuh"), include_str!("kernels/attention_prefill.cu")),
};

/// As [`ATTENTION_DECODE`], for compute capability 9.0 (sm_90a) only.
pub static ATTENTION_PREFILL_HOPPER: Source = Source {
    name: "attention_prefill_wgmma",
    text: concat!(include_str!("kernels/attention_common.cuh"), include_str!("kernels/attention_prefill_wgmma.cu")),
};
