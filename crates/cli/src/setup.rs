//! From options to a loaded engine.

use crate::args::EngineArgs;
use crate::models;
use crate::progress::LoadBar;
use anyhow::{Context, bail};
use glinthawk_cluster::{Engine, EngineConfig};
use glinthawk_compute::Isa;
use glinthawk_jobs::ServedModel;
use glinthawk_model::catalogue::ResolvedModel;
use glinthawk_model::{ChatTemplate, Model, Tokenizer};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

/// A model, opened, with what its text needs.
pub struct Opened {
    /// The weights.
    pub model: Model,
    /// Tokenizer, template and limits.
    pub served: Arc<ServedModel>,
}

/// Finds and opens the model the options name.
pub fn open(args: &EngineArgs) -> anyhow::Result<Opened> {
    let resolved = models::resolve(&args.model)?;
    let model = resolved.open()?;
    let config = model.config();
    let (tokenizer, template) = match &resolved {
        ResolvedModel::Path(_) => (Tokenizer::of(&model)?, ChatTemplate::of(&model)?),
        ResolvedModel::Dummy(_) => (Tokenizer::bytes(config.vocab), None),
    };
    let context_max = match args.max_context {
        Some(wanted) if wanted as usize > config.context_max => bail!(
            "--max-context {wanted} is more than the model was made for: {} tokens",
            config.context_max
        ),
        Some(wanted) => wanted,
        None => config.context_max as u32,
    };
    let identity = model.fingerprint().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string");
        text
    });
    let mut eos_tokens = config.eos_tokens.clone();
    eos_tokens.extend(tokenizer.eos_tokens());
    eos_tokens.sort_unstable();
    eos_tokens.dedup();
    let served = Arc::new(ServedModel {
        name: served_name(&args.model),
        identity,
        tokenizer,
        template,
        vocab: config.vocab as u32,
        context_max,
        eos_tokens,
    });
    Ok(Opened { model, served })
}

/// What results call the model: the name it was asked for by, or its file's or folder's own.
fn served_name(asked: &str) -> String {
    let path = Path::new(asked);
    let own = path
        .canonicalize()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    own.unwrap_or_else(|| asked.to_owned())
}

/// Loads the engine the options describe.
pub fn load(args: &EngineArgs, opened: &Opened) -> anyhow::Result<Engine> {
    let isa = match &args.isa {
        Some(name) => name.parse::<Isa>()?,
        None => Isa::detect(),
    };
    isa.require()?;
    let cores =
        std::thread::available_parallelism().context("cannot count this machine's cores")?;
    let config = EngineConfig {
        slices: 1,
        lanes: 1,
        batch: args.batch,
        flights: args.flights,
        chunk: args.chunk,
        context_memory_bytes: match args.context_memory {
            Some(bytes) => bytes,
            None => free_memory_bytes()? / 2,
        },
        context_max: opened.served.context_max,
        isa,
        threads: args.threads.map_or(cores.get(), |threads| threads as usize),
    };
    let mut bar = LoadBar::new();
    let engine = Engine::load(&opened.model, config, &mut |done, total| bar.show(done, total));
    bar.clear();
    Ok(engine?)
}

/// Memory that could be taken without pushing anything out.
fn free_memory_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")
        .context("cannot tell how much memory is free; give --context-memory")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let kib = kib.context("cannot tell how much memory is free; give --context-memory")?;
    Ok(kib * 1024)
}
