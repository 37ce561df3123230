//! Which instruction sets the kernels know, and which of them this machine has.

use crate::ComputeError;
use std::fmt;
use std::str::FromStr;

/// An instruction-set path of the CPU kernels, from the plainest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain loops in f32, on any machine; the oracle.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with bf16 dot products and permutations of bytes (VBMI).
    Avx512Bf16,
    /// AMX tiles of bf16, with AVX-512 around them.
    Amx,
}

/// Counted up whenever the x86 kernels give other bits than before: it is part of the kind of device that a result
/// belongs to, so that a job does not go on with other bits than it began with.
const KERNEL_REVISION: u32 = 4;

impl Isa {
    const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The fastest path this machine has.
    pub fn detect() -> Isa {
        Self::fastest(&Self::available(), is_by_intel())
    }

    /// The fastest of these paths, plainest first. Intel's cores take two cycles for a bf16 dot product of 512 bits: there,
    /// widening is up to 1.8 times as fast.
    fn fastest(available: &[Isa], by_intel: bool) -> Isa {
        match available.last() {
            Some(Isa::Avx512Bf16) if by_intel => Isa::Avx512,
            last => *last.expect("portable is always there"),
        }
    }

    /// All paths this machine has, plainest first.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Fails if this machine lacks the path.
    pub fn require(self) -> Result<(), ComputeError> {
        if self.is_available() {
            return Ok(());
        }
        let names: Vec<&str> = Self::available().into_iter().map(Isa::name).collect();
        Err(ComputeError::IsaUnavailable { isa: self, available: names.join(", ") })
    }

    /// The path's name, as options and statistics spell it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// What decides the bits of results: the path, and the revision of its kernels. `Portable` has no other.
    pub fn kind(self) -> String {
        match self {
            Isa::Portable => self.name().to_owned(),
            _ => format!("{self}-r{KERNEL_REVISION}"),
        }
    }

    /// The path of this kind; an error for one of another revision.
    pub fn of_kind(kind: &str) -> Result<Isa, ComputeError> {
        let known = Self::ALL.into_iter().find(|isa| isa.kind() == kind);
        known.ok_or_else(|| ComputeError::IsaUnknown { name: kind.to_owned() })
    }

    /// Rows whose products take about as long as reading the weights, on one core.
    pub fn rows_per_reading(self) -> u32 {
        match self {
            Isa::Portable => 1,
            Isa::Avx2 => 4,
            Isa::Avx512 => 10,
            Isa::Avx512Bf16 => 8,
            Isa::Amx => 90,
        }
    }

    /// Whether rows are widened to f32 before products read them, because there are no instructions for bf16.
    pub(crate) fn widens(self) -> bool {
        matches!(self, Isa::Avx2 | Isa::Avx512)
    }

    /// Positions that a page of contexts may have on this path, the best first.
    pub fn page_positions(self) -> &'static [u32] {
        match self {
            Isa::Portable => &[16, 8, 32, 5],
            // A tile of keys has 16 positions, and one of values 32.
            _ => &[32, 16],
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        let avx512 = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("fma")
        };
        let bf16 =
            || is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512() && bf16(),
            Isa::Amx => avx512() && bf16() && tiles_granted(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Isa::Portable
    }
}

/// Whether the processor says that Intel made it.
#[cfg(target_arch = "x86_64")]
fn is_by_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
    name == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_by_intel() -> bool {
    false
}

/// Whether the processor has AMX bf16 tiles and the kernel lets this process use them. Asking also
/// grants the permission, for the whole process and for threads started later.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_granted() -> bool {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;
    static GRANTED: OnceLock<bool> = OnceLock::new();

    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_TILE_DATA: i64 = 18;

    *GRANTED.get_or_init(|| {
        if __cpuid_count(0, 0).eax < 7 {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        if features & AMX_BF16 == 0 || features & AMX_TILE == 0 {
            return false;
        }
        let mut result = ARCH_PRCTL;
        // SAFETY: a system call that takes two integers and touches no memory of ours; rcx and r11
        // are what `syscall` itself overwrites.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    })
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_granted() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = ComputeError;

    fn from_str(name: &str) -> Result<Isa, ComputeError> {
        let known = Self::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| ComputeError::IsaUnknown { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_best_is_available() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
            assert_eq!(Isa::of_kind(&isa.kind()).unwrap(), isa);
        }
        assert!("sse9".parse::<Isa>().is_err());
        assert!(Isa::of_kind("amx-r1").is_err(), "its bits were others");
        assert_eq!(Isa::available()[0], Isa::Portable);
        assert!(Isa::detect().require().is_ok());
    }

    #[test]
    fn slow_dot_products_are_not_chosen() {
        let all = &Isa::ALL;
        assert_eq!([true, false].map(|intel| Isa::fastest(all, intel)), [Isa::Amx; 2]);
        let no_tiles = &all[..4];
        assert_eq!(Isa::fastest(no_tiles, true), Isa::Avx512);
        assert_eq!(Isa::fastest(no_tiles, false), Isa::Avx512Bf16);
        assert_eq!([true, false].map(|intel| Isa::fastest(&all[..2], intel)), [Isa::Avx2; 2]);
    }
}
