//! GPUs of this machine: what there is, what is missing, and a device that was opened.

use super::text::KERNEL_REVISION;
use crate::ComputeError;
use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use std::sync::Arc;

/// Lowest compute capability: the first whose matrix units have the shapes that the kernels use.
const CAPABILITY_MIN: (i32, i32) = (7, 5);
/// The first with bf16 in its matrix units.
const CAPABILITY_BF16: (i32, i32) = (8, 0);
/// The first whose kernels can wait for those before them by themselves.
const CAPABILITY_EARLY: (i32, i32) = (9, 0);

/// Has the driver wait for every kernel that it is given.
const BLOCKING: &str = "CUDA_LAUNCH_BLOCKING";

/// The numbers of 16 bits that a device multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    Bf16,
    /// Where there is no bf16: what is beyond its range becomes its largest, and such weights are refused.
    F16,
}

/// A GPU of this machine.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Its number, as in `cuda:0`.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Memory that nobody has taken.
    pub memory_free_bytes: u64,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Why it cannot be used, where it cannot.
    pub problem: Option<String>,
}

/// The GPUs of this machine; an error says what is missing.
pub fn gpus() -> Result<Vec<Gpu>, ComputeError> {
    require_libraries()?;
    let count = CudaContext::device_count().map_err(|error| unusable("the driver", error))?;
    (0..count as usize).map(describe).collect()
}

fn describe(ordinal: usize) -> Result<Gpu, ComputeError> {
    let device = format!("cuda:{ordinal}");
    let context = CudaContext::new(ordinal).map_err(|error| unusable(&device, error))?;
    let wrap = |error| unusable(&device, error);
    let (memory_free, memory) = context.mem_get_info().map_err(wrap)?;
    let capability = context.compute_capability().map_err(wrap)?;
    let problem = (capability < CAPABILITY_MIN).then(|| {
        let ((major, minor), (major_min, minor_min)) = (capability, CAPABILITY_MIN);
        format!("compute capability {major}.{minor}: {major_min}.{minor_min} or later is needed")
    });
    Ok(Gpu {
        ordinal,
        name: context.name().map_err(wrap)?,
        capability,
        memory_free_bytes: memory_free as u64,
        memory_bytes: memory as u64,
        problem,
    })
}

/// Whether NVIDIA's driver is on this machine: without it nobody expects a GPU to be used.
pub fn has_driver() -> bool {
    // SAFETY: NVIDIA's own library, whose initialisers may run anywhere.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// Fails if a library is missing: asking cudarc for one that is not there would panic.
fn require_libraries() -> Result<(), ComputeError> {
    let missing = |library: &'static str, hint: &'static str| {
        Err(ComputeError::CudaMissing { library, hint })
    };
    // SAFETY: these are NVIDIA's own libraries, whose initialisers may run anywhere.
    let (cublas, nvrtc) = unsafe {
        (cudarc::cublaslt::sys::is_culib_present(), cudarc::nvrtc::sys::is_culib_present())
    };
    if !has_driver() {
        return missing("the NVIDIA driver (libcuda.so)", "install the driver of your GPU");
    }
    if !cublas {
        return missing("cuBLASLt (libcublasLt.so)", "install CUDA's libcublas 12 or 13");
    }
    if !nvrtc {
        return missing("NVRTC (libnvrtc.so)", "install CUDA's libnvrtc 12 or 13");
    }
    Ok(())
}

fn unusable(device: &str, error: DriverError) -> ComputeError {
    ComputeError::Cuda {
        device: device.to_owned(),
        what: "open it".to_owned(),
        reason: words(error),
    }
}

/// A driver's error in words. The device works by itself: what a kernel did wrong is noticed later, by whoever asks next.
fn words(error: DriverError) -> String {
    use CUresult as Code;
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    let text = text.unwrap_or_else(|_| format!("{error:?}"));
    let by_a_kernel = matches!(
        error.0,
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
    );
    if by_a_kernel && std::env::var_os(BLOCKING).is_none() {
        return format!(
            "{text} (in this or a kernel before it; with {BLOCKING}=1 the error names it)"
        );
    }
    text
}

/// A GPU in use: its context and the one stream that all kernels go through, in order.
#[derive(Clone)]
pub struct CudaDevice {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    /// Activations that arrive with messages.
    pub(super) copies_in: Arc<CudaStream>,
    /// Activations that leave with messages.
    pub(super) copies_out: Arc<CudaStream>,
    ordinal: usize,
    name: Arc<str>,
    capability: (i32, i32),
    pub(super) half: Half,
}

impl CudaDevice {
    /// Opens GPU `ordinal`.
    pub fn open(ordinal: usize) -> Result<Self, ComputeError> {
        require_libraries()?;
        let gpu = describe(ordinal)?;
        if let Some(reason) = gpu.problem {
            let device = format!("cuda:{ordinal}, {}", gpu.name);
            return Err(ComputeError::Cuda { device, what: "use it".to_owned(), reason });
        }
        let device = format!("cuda:{ordinal}");
        let context = CudaContext::new(ordinal).map_err(|error| unusable(&device, error))?;
        // SAFETY: kernels go through one stream, so the order of calls is all the tracking that they need. The streams
        // for copies wait for events (`activations.rs`).
        unsafe { context.disable_event_tracking() };
        let stream = || context.new_stream().map_err(|error| unusable(&device, error));
        let (kernels, copies_in, copies_out) = (stream()?, stream()?, stream()?);
        let (name, capability) = (gpu.name.into(), gpu.capability);
        let half = if capability < CAPABILITY_BF16 { Half::F16 } else { Half::Bf16 };
        let stream = kernels;
        Ok(Self { context, stream, copies_in, copies_out, ordinal, name, capability, half })
    }

    /// Its name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same device, used as one without bf16.
    #[cfg(test)]
    pub(crate) fn in_f16(self) -> Self {
        Self { half: Half::F16, ..self }
    }

    /// What decides the bits of results: the kind of device, and the revision of our kernels.
    pub fn kind(&self) -> String {
        let (major, minor) = self.capability;
        format!("cuda-sm{major}{minor}-r{KERNEL_REVISION}")
    }

    /// Compute capability, as the compiler's option names it.
    pub(super) fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// What decides how fast anything is on it: its name and shape, and the driver's version.
    pub(super) fn description(&self) -> Result<String, ComputeError> {
        let mut driver = 0;
        // SAFETY: the driver writes one number.
        let asked = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut driver) };
        asked.result().map_err(self.failed("ask for the driver's version"))?;
        let (name, processors) = (&self.name, self.processors()?);
        Ok(format!("{name}, {}, {processors} processors, driver {driver}", self.architecture()))
    }

    /// What tells it from every other GPU.
    pub fn uuid(&self) -> Result<[u8; 16], ComputeError> {
        let uuid = self.context.uuid().map_err(self.failed("ask for its name"))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Memory that nobody has taken.
    pub fn memory_free_bytes(&self) -> Result<u64, ComputeError> {
        let (free, _) = self.context.mem_get_info().map_err(self.failed("ask for its memory"))?;
        Ok(free as u64)
    }

    /// Waits for everything that it was given.
    pub fn synchronize(&self) -> Result<(), ComputeError> {
        self.stream.synchronize().map_err(self.failed("finish its work"))
    }

    /// An event that can be recorded, with its time.
    pub(super) fn event(&self) -> Result<CudaEvent, ComputeError> {
        let flags = CUevent_flags::CU_EVENT_DEFAULT;
        self.context.new_event(Some(flags)).map_err(self.failed("make an event"))
    }

    /// Queues a copy from one place on it to another.
    pub(super) fn copy(&self, to: u64, from: u64, len_bytes: usize) -> Result<(), ComputeError> {
        let failed = || self.failed(&format!("copy {len_bytes} bytes on it"));
        self.context.bind_to_thread().map_err(failed())?;
        // SAFETY: callers pass addresses of buffers that hold so many bytes.
        let copied =
            unsafe { result::memcpy_dtod_async(to, from, len_bytes, self.stream.cu_stream()) };
        copied.map_err(failed())
    }

    /// Whether a kernel can begin before the one before it has ended.
    pub(super) fn begins_early(&self) -> bool {
        self.capability >= CAPABILITY_EARLY
    }

    /// Whether four warps can multiply together: compute capability 9.0 and no other.
    pub(super) fn is_hopper(&self) -> bool {
        self.capability == (9, 0) && self.half == Half::Bf16
    }

    /// Shared memory that a block can have.
    pub(super) fn shared_bytes(&self) -> Result<usize, ComputeError> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Shared memory that the blocks of a multiprocessor have together.
    pub(super) fn processor_shared_bytes(&self) -> Result<usize, ComputeError> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    }

    /// Multiprocessors.
    pub(super) fn processors(&self) -> Result<usize, ComputeError> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<usize, ComputeError> {
        let value = self.context.attribute(attribute).map_err(self.failed("ask for its shape"))?;
        Ok(value as usize)
    }

    /// Turns a driver's error into one that names the device and what was being done.
    pub(super) fn failed(&self, what: &str) -> impl FnOnce(DriverError) -> ComputeError + use<> {
        let (device, what) = (format!("cuda:{}", self.ordinal), what.to_owned());
        move |error| ComputeError::Cuda { device, what, reason: words(error) }
    }

    /// An error of ours that names the device.
    pub(super) fn error(&self, what: &str, reason: String) -> ComputeError {
        ComputeError::Cuda {
            device: format!("cuda:{}", self.ordinal),
            what: what.to_owned(),
            reason,
        }
    }
}
