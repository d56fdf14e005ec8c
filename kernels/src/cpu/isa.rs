//! Instruction sets, chosen at run time. All but the reference give the same bits.

use std::fmt;
use std::sync::OnceLock;

/// The instruction set that a CPU device's kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain f32 loops over dequantised weights and unrounded activations: what the others are compared with.
    Reference,
    /// Portable Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// [`Isa::Avx512`] and the int8 and bf16 tiles of AMX.
    Amx,
}

impl Isa {
    /// Every form, slowest first.
    pub const ALL: [Isa; 5] = [Isa::Reference, Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The fastest form this machine offers.
    pub fn detect() -> Isa {
        let mut best = Isa::Portable;
        for isa in Isa::ALL {
            if isa.is_available() && isa != Isa::Reference {
                best = isa;
            }
        }
        best
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Reference | Isa::Portable => true,
            Isa::Avx2 => has_avx2(),
            Isa::Avx512 => has_avx512(),
            Isa::Amx => has_avx512() && has_amx(),
        }
    }

    /// Forms with equal names here give equal bits in every operation.
    pub(crate) fn numeric_class(self) -> &'static str {
        match self {
            Isa::Reference => "reference",
            Isa::Portable | Isa::Avx2 | Isa::Avx512 | Isa::Amx => "exact",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Reference => "reference",
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512-vnni",
            Isa::Amx => "amx",
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// AMX needs the processor's word (CPUID leaf 7: bits 22 bf16, 24 tile, 25 int8) and the kernel's leave (`arch_prctl`),
/// which holds for every thread of the process once given.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| {
        let leaf7 = std::arch::x86_64::__cpuid_count(7, 0);
        let wanted = 1 << 22 | 1 << 24 | 1 << 25;
        if std::arch::x86_64::__cpuid(0).eax < 7
            || leaf7.edx & wanted != wanted
            || !is_x86_feature_detected!("avx512bf16")
        {
            return false;
        }
        // SAFETY: arch_prctl with this code only asks the kernel for a permission; it touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn has_amx() -> bool {
    false
}
