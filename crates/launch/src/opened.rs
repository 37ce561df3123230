//! A model, found and opened.

use crate::device::Device;
use crate::error::LaunchError;
use crate::news::{LaunchNews, Tell};
use crate::specification::{Specification, Topology};
use glinthawk_cluster::{Kinds, NodeKind, node_name};
use glinthawk_compute::cuda::{CudaDevice, gpus};
use glinthawk_compute::{ContextType, Isa};
use glinthawk_jobs::ServedModel;
use glinthawk_model::catalogue::{self, ResolvedModel};
use glinthawk_model::{ChatTemplate, Model, ModelConfig, ModelIdentity, Tokenizer};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A model, opened, with what its text needs.
pub struct Opened {
    /// The weights.
    pub model: Arc<Model>,
    /// Tokenizer, template and limits. Its identity is still empty: a job needs `identified`.
    pub served: Arc<ServedModel>,
    /// The GPU that it will run on; none is the CPU.
    pub device: Option<CudaDevice>,
    /// What local processes run on, Tier 1 first; each with the kind of a GPU.
    pub(crate) local: Vec<(Device, Option<String>)>,
    weights_identity: OnceLock<ModelIdentity>,
}

impl Opened {
    /// Checks a specification, finds its device, and opens its model.
    pub fn open(specification: &Specification, tell: Tell<'_>) -> Result<Self, LaunchError> {
        specification.check()?;
        let device = specification.device().open(tell)?;
        let local = specification.local_devices()?.into_iter().map(with_kind);
        let local = local.collect::<Result<_, _>>()?;
        let (model, served) = open(&specification.model, specification.context_max, tell)?;
        let (model, served) = (Arc::new(model), Arc::new(served));
        Ok(Self { model, served, device, local, weights_identity: OnceLock::new() })
    }

    /// A model like it with fewer layers and random weights, on the same device: for measurements.
    pub(crate) fn shortened(&self, layers: usize) -> Self {
        let config = ModelConfig { layers, ..self.model.config().clone() };
        Self {
            model: Arc::new(Model::random(self.model.name().to_owned(), config)),
            served: Arc::clone(&self.served),
            device: self.device.clone(),
            local: Vec::new(),
            weights_identity: OnceLock::new(),
        }
    }

    /// The identity of the weights; hashes them unless that was done before.
    pub(crate) fn weights_identity(&self, tell: Tell<'_>) -> ModelIdentity {
        *self.weights_identity.get_or_init(|| {
            let show = &mut |done, total| tell(LaunchNews::Checking(done, total));
            ModelIdentity::of_weights(&self.model, show)
        })
    }

    /// Whether any of it runs on a GPU, as far as is known here.
    pub fn has_gpu(&self) -> bool {
        self.device.is_some() || self.local.iter().any(|(_, kind)| kind.is_some())
    }

    /// The GPU of a node of this machine, Tier 1 first.
    pub(crate) fn gpu_of(&self, node: usize) -> Option<CudaDevice> {
        match self.local.get(node) {
            // It could be opened before.
            Some((Device::Cuda(ordinal), _)) => CudaDevice::open(*ordinal).ok(),
            Some(_) => None,
            None => self.device.clone(),
        }
    }

    /// What kernels run on: GPUs by their kind, CPUs by their instruction set. Workers from elsewhere are not among them.
    pub fn kinds(&self, isa: Isa, topology: &Topology) -> Result<Kinds, LaunchError> {
        let own = (Device::Cpu, self.device.as_ref().map(CudaDevice::kind));
        let is_here = self.local.is_empty() || topology.is_one_process();
        let local = if is_here { std::slice::from_ref(&own) } else { &self.local };
        let (slices, tier2) = topology.nodes()?;
        let pipelines = topology.pipelines();
        let tier1 = pipelines * slices;
        let tier1_attends = topology.hybrid || tier2 == 0;
        Ok(Kinds::new(local.iter().enumerate().map(|(index, (_, kind))| NodeKind {
            name: {
                let (station, lane) = match index.checked_sub(tier1) {
                    None => (index, None),
                    Some(index) => (index / tier2, Some(index % tier2)),
                };
                let (own, pipeline) = (usize::from(tier1_attends), station / slices);
                let lane = lane.map(|lane| (pipeline * (own + tier2) + own + lane) as u32);
                node_name((pipelines > 1).then_some(pipeline), station % slices, lane)
            },
            kind: kind.clone().unwrap_or_else(|| isa.kind()),
            has_weights: index < tier1,
            attends: index >= tier1 || tier1_attends,
        })))
    }

    /// The served model with the identity of everything that decides its results; bits differ between kinds of
    /// kernels.
    pub fn identified(
        &self,
        kinds: &Kinds,
        context_type: ContextType,
        tell: Tell<'_>,
    ) -> Arc<ServedModel> {
        let mut served = ServedModel::clone(&self.served);
        let (tokenizer, template) = (&served.tokenizer, served.template.as_ref());
        let model = ModelIdentity::of_model(self.weights_identity(tell), tokenizer, template);
        served.identity =
            format!("{model}, {context_type} contexts, {kinds}, ends {:?}", served.eos_tokens);
        Arc::new(served)
    }
}

/// A device with its kind, if it is a GPU. It is opened only as long as it takes to know that a worker can.
fn with_kind(device: Device) -> Result<(Device, Option<String>), LaunchError> {
    let Device::Cuda(ordinal) = device else { return Ok((device, None)) };
    let error = match CudaDevice::open(ordinal) {
        Ok(gpu) => return Ok((device, Some(gpu.kind()))),
        Err(error) => error,
    };
    match gpus().map_or(0, |gpus| gpus.len()) {
        count @ 1.. if ordinal >= count => Err(LaunchError::GpuMissing { ordinal, count }),
        _ => Err(error.into()),
    }
}

/// Opens what a model's text needs, and nothing that takes as long as its weights are large.
pub fn open_text(
    name: &str,
    context_max: Option<u32>,
    tell: Tell<'_>,
) -> Result<ServedModel, LaunchError> {
    Ok(open(name, context_max, tell)?.1)
}

fn open(
    name: &str,
    context_max: Option<u32>,
    tell: Tell<'_>,
) -> Result<(Model, ServedModel), LaunchError> {
    let resolved = catalogue::resolve(name, &mut |progress| tell(LaunchNews::Pulling(progress)))?;
    let model = resolved.open()?;
    let config = model.config();
    let (tokenizer, template) = match &resolved {
        ResolvedModel::Path(_) => (Tokenizer::of(&model)?, ChatTemplate::of(&model)?),
        ResolvedModel::Dummy(_) => (Tokenizer::bytes(config.vocab), None),
    };
    let context_max = match context_max {
        Some(wanted) if wanted as usize > config.context_max => {
            return Err(LaunchError::ContextMax { wanted, context_max: config.context_max });
        }
        Some(wanted) => wanted,
        None => config.context_max as u32,
    };
    let mut eos_tokens = config.eos_tokens.clone();
    eos_tokens.extend(tokenizer.eos_tokens());
    eos_tokens.sort_unstable();
    eos_tokens.dedup();
    let served = ServedModel {
        name: served_name(name),
        identity: String::new(),
        tokenizer,
        template,
        vocab: config.vocab as u32,
        context_max,
        eos_tokens,
    };
    Ok((model, served))
}

/// The model's name in results: its file's or folder's own name, else the name the user gave.
fn served_name(asked: &str) -> String {
    let path = Path::new(asked);
    let own = path
        .canonicalize()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    own.unwrap_or_else(|| asked.to_owned())
}
