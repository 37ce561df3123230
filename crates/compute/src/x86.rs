//! The x86-64 backend: one packed layout and one structure for AVX2, AVX-512, AVX512-BF16 and AMX,
//! which differ only in their innermost loops.

mod amx;
mod attention;
mod ceilings;
mod context;
mod delayed_epilogue;
mod epilogue;
mod functions;
mod int8;
mod norm;
mod pack;
mod pages;
mod panel_pass;
mod product;
mod simd;
mod softmax;
mod store;
mod tiles;
mod vector;
mod weigh;
mod weights;

pub(crate) use ceilings::{peak, peak_operations, read};
pub(crate) use context::X86Context;
pub(crate) use weights::X86Weights;

/// Makes a function that runs its generic twin, compiled for the instruction set it is asked for.
macro_rules! for_each_isa {
    (
        $(#[$meta:meta])*
        fn $name:ident $(<$type:ident: $bound:ident>)? = $generic:ident($($argument:ident: $kind:ty),* $(,)?)
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The machine has `isa`, and the arguments meet the generic function's
        /// requirements.
        pub(super) unsafe fn $name$(<$type: $bound>)?(isa: $crate::Isa, $($argument: $kind),*) {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2$(<$type: $bound>)?($($argument: $kind),*) {
                // SAFETY: as promised by the caller.
                unsafe { $generic::<$crate::x86::simd::Ymm2 $(, $type)?>($($argument),*) }
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512$(<$type: $bound>)?($($argument: $kind),*) {
                // SAFETY: as promised by the caller.
                unsafe { $generic::<$crate::x86::simd::Zmm $(, $type)?>($($argument),*) }
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
            unsafe fn avx512bf16$(<$type: $bound>)?($($argument: $kind),*) {
                // SAFETY: as promised by the caller.
                unsafe { $generic::<$crate::x86::simd::ZmmBf16 $(, $type)?>($($argument),*) }
            }
            // SAFETY: as promised by the caller.
            unsafe {
                match isa {
                    $crate::Isa::Portable => unreachable!("the portable backend has its own code"),
                    $crate::Isa::Avx2 => avx2($($argument),*),
                    $crate::Isa::Avx512 => avx512($($argument),*),
                    $crate::Isa::Avx512Bf16 | $crate::Isa::Amx => avx512bf16($($argument),*),
                }
            }
        }
    };
}
use for_each_isa;
