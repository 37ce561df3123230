//! The kernels: `.cu` texts compiled by NVRTC for one model's shape, and their launches.

use super::device::{CudaDevice, Half};
use super::kept::Entry;
use super::text;
use crate::ComputeError;
use cudarc::driver::sys::{self, CUfunction_attribute};
use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;
use glinthawk_model::ModelConfig;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// Bytes that the keys, or the values, of 64 positions take in shared memory for every 64 dimensions; as in attention.cu.
const PANEL_BYTES: usize = 64 * 64 * 2;
/// Keys and values that a warp which decodes has room for.
pub(super) const FEW_SLOTS: usize = 3;
/// Bytes that what it has of the splits before takes in shared memory for every 64 dimensions.
const KEPT_BYTES: usize = 64 * 16 * 4;
/// Such warps that a multiprocessor is to have room for.
const FEW_BLOCKS: usize = 4;
/// Warps of a block that shares keys and values; on Hopper four more fetch them.
pub(super) const MANY_WARPS: usize = 8;
const HOPPER_WARPS: usize = MANY_WARPS + 4;
/// Keys with values that such a block has room for, at most.
const MANY_STAGES_MAX: usize = 4;
/// What Hopper's barriers take.
const BARRIER_BYTES: usize = 128;
/// Threads of a warp.
const WARP: u32 = 32;

const NORM_THREADS: u32 = 256;
const ROTATE_THREADS: u32 = 128;
const ARGMAX_THREADS: u32 = 512;
const SAMPLE_THREADS: u32 = 512;
const REPORT_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// Threads that keep a token each.
pub(super) const KEEP_THREADS: u32 = 256;
/// Heads that a block of `rotate` handles at a time: each warp four.
pub(super) const ROTATE_HEADS: usize = 4 * (ROTATE_THREADS / WARP) as usize;
const ACTIVATE_THREADS: u32 = 256;
/// Values that a block of `activate` handles: each thread two times eight.
pub(super) const ACTIVATE_VALUES: usize = 2 * 8 * ACTIVATE_THREADS as usize;

/// Kernels that begin before the one before them has ended, where the device can: their texts wait for it
/// (`await_earlier`) once they have read what was there before the layer.
/// `rotate` and `attend_few` let the next one begin at once (`let_next_begin`). So what these two read before they wait must be
/// complete when the kernel before `rotate` has ended: a product, which begins and ends as a whole.
const EARLY: [&str; 5] = ["norm_rows", "rotate", "activate", "attend_few", "combine"];

/// A kernel, how many threads a block of it has, and how much shared memory it asks for.
pub(super) struct Kernel {
    function: CudaFunction,
    name: &'static str,
    threads: u32,
    shared_bytes: u32,
    /// Whether it may begin before the kernel before it has ended.
    early: bool,
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Arg {
    /// An address on the device; 0 is none.
    Address(u64),
    /// A number.
    Number(u32),
}

/// All kernels, compiled for a model.
pub(super) struct Module {
    device: CudaDevice,
    pub(super) bind_pages: Kernel,
    pub(super) embed: Kernel,
    pub(super) take_rows: Kernel,
    pub(super) norm_rows: Kernel,
    pub(super) rotate: Kernel,
    pub(super) append: Kernel,
    pub(super) activate: Kernel,
    pub(super) argmax: Kernel,
    pub(super) sample: Kernel,
    pub(super) report: Kernel,
    pub(super) keep_tokens: Kernel,
    pub(super) attend_many: Kernel,
    pub(super) attend_shared: Kernel,
    attend_few: Kernel,
    pub(super) combine: Kernel,
    /// Multiprocessors, and the shared memory of each.
    processors: u32,
    processor_bytes: u32,
    /// Blocks of `attend_many` and `attend_shared` at most: each of them goes on to the next unit where it is Hopper's.
    pub(super) many_blocks: u32,
    /// Whether `attend_many` is Hopper's.
    pub(super) hopper: bool,
}

/// Whether `attend_many` is Hopper's, given that the device is.
fn fits_hopper(config: &ModelConfig) -> bool {
    config.head_dim.is_multiple_of(64) && config.head_dim <= 128
}

/// The kernels in machine code, from the cache if they were compiled before; an error is the compiler's.
fn compiled(options: &[String], hopper: bool) -> Result<Vec<u8>, String> {
    let source = text::source(hopper);
    let key = format!("{}\n{}\n{source}", text::compiler_version()?, options.join("\n"));
    let entry = Entry::new("kernels", key);
    if let Some(code) = entry.read() {
        return Ok(code);
    }
    let code = text::compile(&source, options)?;
    entry.write(&code);
    Ok(code)
}

/// The compiler's options for an architecture and a model's shape.
fn options(
    config: &ModelConfig,
    architecture: &str,
    (many_stages, few_kept): (usize, bool),
    half: Half,
) -> Vec<String> {
    // exp(x) is computed as 2^(x · log2 e).
    let score_scale = std::f64::consts::LOG2_E / (config.head_dim as f64).sqrt();
    let macros = [
        ("HIDDEN", config.hidden.to_string()),
        ("HEADS", config.heads.to_string()),
        ("KV_HEADS", config.kv_heads.to_string()),
        ("HEAD_DIM", config.head_dim.to_string()),
        ("FEED_FORWARD", config.feed_forward.to_string()),
        ("VOCAB", config.vocab.to_string()),
        ("NORM_EPS", format!("{:e}", config.norm_eps)),
        ("WINDOW", config.sliding_window.unwrap_or(0).to_string()),
        ("SCORE_SCALE", format!("{score_scale:e}")),
        ("FEW_SLOTS", FEW_SLOTS.to_string()),
        ("FEW_KEPT", u32::from(few_kept).to_string()),
        ("MANY_WARPS", MANY_WARPS.to_string()),
        ("MANY_STAGES", many_stages.to_string()),
    ];
    let mut options = ["--std=c++17", "--fmad=false"].map(str::to_owned).to_vec();
    options.push(format!("--gpu-architecture={architecture}"));
    if half == Half::F16 {
        options.push("-DF16".to_owned());
    }
    options.extend(macros.into_iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

impl Module {
    /// Compiles and loads the kernels for a model's shape.
    pub(super) fn new(device: &CudaDevice, config: &ModelConfig) -> Result<Self, ComputeError> {
        let slot_bytes = config.head_dim.div_ceil(64) * PANEL_BYTES;
        let shared_bytes = device.shared_bytes()?;
        let many_stages = (shared_bytes / (2 * slot_bytes)).min(MANY_STAGES_MAX);
        if shared_bytes < FEW_SLOTS * slot_bytes {
            let what = format!("head_dim {} on this GPU", config.head_dim);
            return Err(ComputeError::Shape { what });
        }
        let (few_bytes, kept_bytes) =
            (FEW_SLOTS * slot_bytes, config.head_dim.div_ceil(64) * KEPT_BYTES);
        let few_kept = FEW_BLOCKS * (few_bytes + kept_bytes) <= shared_bytes;
        let hopper = device.is_hopper() && fits_hopper(config);
        let architecture = device.architecture() + if hopper { "a" } else { "" };
        let options = options(config, &architecture, (many_stages, few_kept), device.half);
        let code = compiled(&options, hopper)
            .map_err(|reason| device.error("compile its kernels", reason))?;
        let code = Ptx::from_binary(code);
        let module = device.context.load_module(code).map_err(device.failed("load its kernels"))?;
        let many_bytes = many_stages * 2 * slot_bytes + if hopper { BARRIER_BYTES } else { 0 };
        let kernel = |name, threads, shared_bytes: usize| {
            Kernel::load(device, &module, name, threads, shared_bytes as u32)
        };
        let processors = device.processors()? as u32;
        let (many_warps, many_blocks) = match hopper {
            true => (HOPPER_WARPS, processors),
            false => (MANY_WARPS, u32::MAX),
        };
        let processor_bytes = device.processor_shared_bytes()? as u32;
        let few_bytes = few_bytes + if few_kept { kept_bytes } else { 0 };
        let attend_few = kernel("attend_few", WARP, few_bytes)?;
        attend_few.allow(device, room_for(1, processor_bytes).max(few_bytes as u32))?;
        Ok(Self {
            bind_pages: kernel("bind_pages", WARP, 0)?,
            embed: kernel("embed", 256, 0)?,
            take_rows: kernel("take_rows", 256, 0)?,
            norm_rows: kernel("norm_rows", NORM_THREADS, 0)?,
            rotate: kernel("rotate", ROTATE_THREADS, 0)?,
            append: kernel("append", 256, 0)?,
            activate: kernel("activate", ACTIVATE_THREADS, 0)?,
            argmax: kernel("argmax", ARGMAX_THREADS, 0)?,
            sample: kernel("sample", SAMPLE_THREADS, 0)?,
            report: kernel("report", REPORT_THREADS, 0)?,
            keep_tokens: kernel("keep_tokens", KEEP_THREADS, 0)?,
            attend_many: kernel("attend_many", many_warps as u32 * WARP, many_bytes)?,
            attend_shared: kernel("attend_shared", many_warps as u32 * WARP, many_bytes)?,
            attend_few,
            combine: kernel("combine", COMBINE_THREADS, 0)?,
            processors,
            processor_bytes,
            many_blocks,
            hopper,
            device: device.clone(),
        })
    }

    /// Queues a kernel; nothing happens for an empty grid.
    pub(super) fn launch(
        &self,
        kernel: &Kernel,
        grid: (u32, u32, u32),
        args: &[Arg],
    ) -> Result<(), ComputeError> {
        self.queue(kernel, grid, kernel.shared_bytes, args)
    }

    /// Queues attention of rows that decode, in so many blocks.
    pub(super) fn attend_few(&self, blocks: u32, args: &[Arg]) -> Result<(), ComputeError> {
        let kernel = &self.attend_few;
        let most = blocks.div_ceil(self.processors);
        let share = if kernel.early { room_for(most, self.processor_bytes) } else { 0 };
        self.queue(kernel, (blocks, 1, 1), kernel.shared_bytes.max(share), args)
    }

    fn queue(
        &self,
        kernel: &Kernel,
        grid: (u32, u32, u32),
        shared_bytes: u32,
        args: &[Arg],
    ) -> Result<(), ComputeError> {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let mut pointers: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.device.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: kernel.early.into(),
        };
        let function = kernel.function.cu_function();
        let launched = self.device.context.bind_to_thread().and_then(|()| {
            // SAFETY: callers pass what the kernel's text declares, with addresses of buffers that hold at least what
            // the grid reaches, and that live as long as the stream's work. The driver copies all of it.
            unsafe {
                sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), ptr::null_mut())
                    .result()
            }
        });
        launched.map_err(self.device.failed(&format!("run {} over {grid:?}", kernel.name)))
    }
}

impl Arg {
    /// Where its value is; the driver only reads it.
    fn pointer(&self) -> *mut c_void {
        match self {
            Self::Address(address) => ptr::from_ref(address).cast_mut().cast(),
            Self::Number(number) => ptr::from_ref(number).cast_mut().cast(),
        }
    }
}

impl Kernel {
    fn load(
        device: &CudaDevice,
        module: &Arc<CudaModule>,
        name: &'static str,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<Self, ComputeError> {
        let failed = device.failed(&format!("load its kernel {name}"));
        let function = module.load_function(name).map_err(failed)?;
        let early = device.begins_early() && EARLY.contains(&name);
        let kernel = Self { function, name, threads, shared_bytes, early };
        kernel.allow(device, shared_bytes)?;
        Ok(kernel)
    }

    /// Lets launches ask for more shared memory than the kernel needs.
    fn allow(&self, device: &CudaDevice, shared_bytes: u32) -> Result<(), ComputeError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let failed = device.failed(&format!("give shared memory to {}", self.name));
        self.function.set_attribute(attribute, shared_bytes as i32).map_err(failed)
    }
}

/// Shared memory of a block, so that a multiprocessor has room for `most` of them and no more. Blocks that begin early find
/// some multiprocessors taken by the kernel before. Without this, they crowd on the others, and the step waits for these.
fn room_for(most: u32, processor_bytes: u32) -> u32 {
    (processor_bytes / (most + 1)).next_multiple_of(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// The compiler's package, which needs no GPU.
    const PACKAGE: &str = "nvidia-cuda-nvrtc>=13,<14";

    /// Fetches NVRTC as the default model is fetched: by pip, into the cache. An error says why it cannot be had.
    fn fetch_nvrtc() -> Result<PathBuf, String> {
        let home =
            || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/glinthawk"));
        let cache = std::env::var_os("GLINTHAWK_CACHE").map(PathBuf::from).or_else(home);
        let folder = cache.ok_or("no cache folder")?.join("nvrtc");
        let python = |args: &[&str]| {
            let run = Command::new("python3").args(args).current_dir(&folder).output();
            let run = run.map_err(|error| format!("python3: {error}"))?;
            let complaint = String::from_utf8_lossy(&run.stderr).into_owned();
            run.status.success().then_some(()).ok_or(complaint)
        };
        let library = folder.join("nvidia/cu13/lib");
        if !library.exists() {
            std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
            python(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PACKAGE])?;
            let files = std::fs::read_dir(&folder).map_err(|error| error.to_string())?;
            let mut names = files.flatten().map(|file| file.file_name().into_string());
            let wheel = names.find_map(|name| name.ok().filter(|name| name.ends_with(".whl")));
            python(&["-m", "zipfile", "-e", &wheel.ok_or("pip left no wheel")?, "."])?;
        }
        Ok(library)
    }

    /// Loads the libraries of a folder whose names begin so; later loads by name find them.
    fn load(folder: &Path, beginning: &str) {
        for file in std::fs::read_dir(folder).expect("a folder").flatten() {
            if file.file_name().to_string_lossy().starts_with(beginning) {
                // SAFETY: NVIDIA's own library, whose initialisers may run anywhere.
                let library = unsafe { libloading::Library::new(file.path()) };
                std::mem::forget(library.expect("a library that loads"));
            }
        }
    }

    #[test]
    fn a_multiprocessor_has_room_for_as_many_blocks_as_are_meant_for_it() {
        // Hopper's; every block takes 1 KiB besides.
        let processor = 228 << 10;
        for most in 1..8 {
            let block = room_for(most, processor) + 1024;
            assert!(most * block <= processor && (most + 1) * block > processor, "{most}: {block}");
        }
    }

    #[test]
    fn kernels_compile_for_every_architecture() {
        let folder = match fetch_nvrtc() {
            Ok(folder) => folder,
            Err(error) => {
                assert!(std::env::var_os("GLINTHAWK_REQUIRE_MODEL").is_none(), "no NVRTC: {error}");
                println!("skipped: no NVRTC: {error}");
                return;
            }
        };
        load(&folder, "libnvrtc-builtins.so");
        load(&folder, "libnvrtc.so");
        let config = ModelConfig::shape("llama3-8b").expect("a known shape");
        let windowed = ModelConfig { sliding_window: Some(4096), head_dim: 256, ..config.clone() };
        for (config, architecture) in [
            (&config, "sm_75"),
            (&config, "sm_80"),
            (&config, "sm_90"),
            (&config, "sm_90a"),
            (&config, "sm_100"),
            (&windowed, "sm_90"),
        ] {
            let hopper = architecture == "sm_90a";
            let half = if architecture == "sm_75" { Half::F16 } else { Half::Bf16 };
            let options = options(config, architecture, (2, hopper), half);
            if let Err(complaint) = text::compile(&text::source(hopper), &options) {
                panic!("for {architecture}: {complaint}");
            }
        }
    }
}
