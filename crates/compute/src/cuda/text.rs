//! The kernels' texts, their compiler, and the revision of the bits that they give.

use cudarc::nvrtc::result::{self as nvrtc, NvrtcError};
use cudarc::nvrtc::sys;
use std::ffi::{CStr, CString};

/// Counted up whenever the kernels give other bits than before: it is part of the kind of device that a result belongs
/// to, so that a job does not go on with other bits than it began with.
pub(super) const KERNEL_REVISION: u32 = 3;

const STEP: &str = include_str!("step.cu");
const ATTENTION: &str = include_str!("attention.cu");
const MANY: &str = include_str!("attend_many.cu");
const HOPPER: &str = include_str!("attend_hopper.cu");
const SAMPLE: &str = include_str!("sample.cu");

/// All kernels, with Hopper's attention or everyone's.
pub(super) fn source(hopper: bool) -> String {
    [STEP, ATTENTION, if hopper { HOPPER } else { MANY }, SAMPLE].concat()
}

/// The compiler's version.
pub(super) fn compiler_version() -> Result<String, String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the compiler writes two numbers.
    let asked = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    asked.result().map_err(|error| format!("{error:?}"))?;
    Ok(format!("NVRTC {major}.{minor}"))
}

/// Compiles a text to machine code; an error is what the compiler says.
pub(super) fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let words = |error: NvrtcError| format!("{error:?}");
    let source = CString::new(source).map_err(|error| error.to_string())?;
    let program = nvrtc::create_program(&source, None).map_err(words)?;
    // SAFETY: the program lives until it is destroyed below, and the code's buffer has the size that is asked for.
    unsafe {
        let compiled = match nvrtc::compile_program(program, options) {
            Ok(()) => machine_code(program).map_err(words),
            Err(error) => Err(match nvrtc::get_program_log(program) {
                Ok(log) => CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned(),
                Err(_) => words(error),
            }),
        };
        nvrtc::destroy_program(program).map_err(words)?;
        compiled
    }
}

/// The machine code of a program.
///
/// # Safety
/// The program was compiled for a real architecture.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, NvrtcError> {
    let mut len = 0;
    // SAFETY: the compiler writes a length, then as many bytes.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut len).result()?;
        let mut code = vec![0u8; len];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    /// Of the texts, as they were when someone last thought about their bits.
    const TEXTS: &str = "95fa41a0ed89f364";

    #[test]
    fn whoever_changes_a_kernel_thinks_of_its_bits() {
        let mut hash = Sha256::new();
        for text in [STEP, ATTENTION, MANY, HOPPER, SAMPLE] {
            hash.update(text);
        }
        let hash: String =
            hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hash, TEXTS,
            "a kernel changed: if it gives other bits than before, count up KERNEL_REVISION; then note the texts' hash"
        );
    }
}
