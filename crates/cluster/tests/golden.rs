//! Golden outputs of the default model from an independent float32 reference, on every instruction
//! set of this machine: the kernels teacher-forced, and the engine running free.

mod engine_support;

use engine_support::{completions, setting};
use glinthawk_cluster::{
    ClusterError, Engine, Fabric, FabricEvent, Kernels, Layout, LocalFabric, NodeReport,
};
use glinthawk_compute::{
    AttendRow, Backend, ComputeError, ContextKernels, ContextSpec, ContextType, CpuBackend,
    CpuContext, CpuWeights, Isa, ShardIn, ShardOut, SliceSpec, Threads, WeightKernels,
};
use glinthawk_flight::{Buffer, PAGE_POSITIONS, Pool};
use glinthawk_model::{Model, testing};
use glinthawk_protocol::{Launch, Prompt, PromptId};
use serde::Deserialize;
use std::sync::Arc;

/// bf16 keeps 8 bits, so a logit near 25 carries about 0.1 from its last product alone; the sums of
/// 30 layers add to it. With int8 contexts 0.85 and a margin of 0.2 were measured.
const BOUNDS: [Bounds; 2] = [
    Bounds { context_type: ContextType::Bf16, logit_error: 0.3, margin_sure: 0.25 },
    Bounds { context_type: ContextType::Int8, logit_error: 1.2, margin_sure: 0.4 },
];

/// Rows of one prefill chunk in the teacher-forced pass.
const CHUNK: usize = 256;

/// Prompts with more tokens than this are long.
const LONG: usize = 500;

#[derive(Deserialize)]
struct Case {
    id: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    margins: Vec<f32>,
    first_top10: Vec<(u32, f32)>,
    sure_steps: usize,
}

fn cases() -> Vec<Case> {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/data/smollm2-135m-q4_1.greedy.json");
    let text = std::fs::read_to_string(path).expect("the golden file is part of the project");
    serde_json::from_str(&text).expect("the golden file is JSON")
}

struct Forward {
    weights: CpuWeights,
    context: CpuContext,
    layers: usize,
    qkv_width: usize,
    query_width: usize,
    vocab: usize,
}

impl Forward {
    fn new(model: &Model, context_type: ContextType, isa: Isa, context_max: usize) -> Self {
        let config = model.config();
        let threads = Arc::new(Threads::new(2).expect("two threads"));
        let spec = SliceSpec::whole(config, CHUNK);
        let backend = CpuBackend { isa, threads, pool: Arc::new(Pool::new(0)) };
        let weights = backend.weights(model, &spec, &mut |_, _| ()).expect("weights");
        let pages = context_max.div_ceil(PAGE_POSITIONS as usize);
        let spec = ContextSpec {
            layers: config.layers,
            pages,
            page_positions: PAGE_POSITIONS,
            context_type,
            slots: 1,
            context_max,
            batch_rows: CHUNK,
        };
        let mut context = backend.context(config, &spec).expect("pages");
        context.bind(0, 0, &(0..pages as u32).collect::<Vec<_>>()).expect("a table");
        Self {
            weights,
            context,
            layers: config.layers,
            qkv_width: config.qkv_width(),
            query_width: config.query_width(),
            vocab: config.vocab,
        }
    }

    /// Logits after each position from `from` on, with all of `tokens` as given.
    fn logits(&mut self, tokens: &[u32], from: usize) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for (chunk, tokens) in tokens.chunks(CHUNK).enumerate() {
            let start = chunk * CHUNK;
            let positions: Vec<u32> =
                (start..start + tokens.len()).map(|position| position as u32).collect();
            self.layers(tokens, &positions).expect("the layers");
            let rows: Vec<usize> = (0..tokens.len()).filter(|row| start + row >= from).collect();
            let mut logits = vec![0.0; rows.len() * self.vocab];
            self.weights.logits(&rows, &mut logits);
            all.extend(logits.chunks_exact(self.vocab).map(<[f32]>::to_vec));
        }
        all
    }

    fn layers(&mut self, tokens: &[u32], positions: &[u32]) -> Result<(), ComputeError> {
        let slab = 0..tokens.len();
        let mut qkv = Buffer::zeroed(tokens.len() * self.qkv_width * 2);
        let mut attended = Buffer::zeroed(tokens.len() * self.query_width * 2);
        let rows: Vec<AttendRow> = positions
            .iter()
            .map(|&position| AttendRow { slot: 0, position, asked: true })
            .collect();
        self.weights.embed(slab.clone(), tokens)?;
        for layer in 0..self.layers {
            self.weights.pre_attention(
                layer,
                &mut [ShardOut { slab: slab.clone(), positions, qkv: &mut qkv }],
            )?;
            self.context.attend(layer, &rows, &qkv, &mut attended)?;
            self.weights.post_attention(
                layer,
                &[ShardIn { slab: slab.clone(), attended: &attended, first: 0 }],
            )?;
        }
        Ok(())
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.expect("a vocabulary").0 as u32
}

/// How far contexts of one type may be from the reference.
struct Bounds {
    context_type: ContextType,
    logit_error: f32,
    /// A margin below this may go either way.
    margin_sure: f32,
}

fn check_teacher_forced(model: &Model, isa: Isa, bounds: &Bounds, cases: &[&Case]) {
    let &Bounds { context_type, logit_error, margin_sure } = bounds;
    let longest = cases.iter().map(|case| case.prompt_ids.len() + case.greedy_ids.len()).max();
    let mut forward = Forward::new(model, context_type, isa, longest.expect("cases"));
    let (mut error_max, mut margin_max): (f32, f32) = (0.0, 0.0);
    let (mut differ, mut tokens_all) = (0, 0);
    for case in cases {
        let tokens: Vec<u32> = case.prompt_ids.iter().chain(&case.greedy_ids).copied().collect();
        let given = case.prompt_ids.len();
        let steps = forward.logits(&tokens[..tokens.len() - 1], given - 1);
        assert_eq!(steps.len(), case.greedy_ids.len());
        for &(token, expected) in &case.first_top10 {
            error_max = error_max.max((steps[0][token as usize] - expected).abs());
        }
        tokens_all += steps.len();
        for (step, logits) in steps.iter().enumerate() {
            if argmax(logits) != case.greedy_ids[step] {
                differ += 1;
                margin_max = margin_max.max(case.margins[step]);
            }
        }
    }
    let what = format!("{}, {context_type} contexts", isa.name());
    println!(
        "{what}: largest error of a top-ten logit {error_max:.3}; {differ} of {tokens_all} tokens differ, \
         margins up to {margin_max:.3}"
    );
    assert!(error_max <= logit_error, "{what}: a logit is off by {error_max}");
    assert!(margin_max < margin_sure, "{what}: another token in spite of a margin of {margin_max}");
}

#[test]
fn teacher_forced_tokens_and_first_logits_match_the_reference() {
    let Some(path) = testing::default_model() else { return };
    let model = Model::open(&path).expect("the default model opens");
    let (long, short): (Vec<_>, Vec<_>) =
        cases().into_iter().partition(|case| case.prompt_ids.len() > LONG);
    let all: Vec<&Case> = short.iter().chain(&long).collect();
    for isa in Isa::available() {
        for bounds in &BOUNDS {
            // The portable path is slow. It has the long context once.
            let once = isa == Isa::Portable && bounds.context_type == ContextType::Int8;
            let cases = if once { &all[..short.len()] } else { &all };
            check_teacher_forced(&model, isa, bounds, cases);
        }
    }
}

/// Lanes that are told to launch every step twice, as if the first had been given up at once, and a third
/// time when it is too late.
struct Relaunching(LocalFabric);

impl Relaunching {
    fn at(launch: &Launch, epoch: u64) -> Launch {
        let mut launch = launch.clone();
        launch.step.epoch = epoch;
        launch
    }
}

impl Fabric for Relaunching {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        let epoch = 2 * launch.step.epoch;
        for epoch in [epoch - 1, epoch, epoch - 1, epoch] {
            self.0.launch(Self::at(&launch, epoch))?;
        }
        Ok(())
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        let mut all = Vec::new();
        self.0.advance(&mut all)?;
        for event in all {
            match event {
                FabricEvent::Home(mut home) if home.step.epoch % 2 == 0 => {
                    home.step.epoch /= 2;
                    events.push(FabricEvent::Home(home));
                }
                FabricEvent::Home(_) => {}
                _ => panic!("one process loses no node"),
            }
        }
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        self.0.reports()
    }
}

#[test]
fn engine_running_free_matches_the_reference_while_it_is_sure() {
    let Some(path) = testing::default_model() else { return };
    let model = Model::open(&path).expect("the default model opens");
    let cases = cases();
    let layout = Layout {
        pipelines: 1,
        slices: 1,
        tier2: 0,
        tier1_attends: true,
        strands: 2,
        batch: 24,
        flights: 2,
        own_batch: None,
        own_first: false,
        chunk: 20,
        context_max: 2048,
        page_positions: PAGE_POSITIONS,
        context_type: ContextType::Bf16,
        whole_flights: false,
        shares_cores: false,
        sharing: true,
        drafts: Some(1000),
    };
    let kernels = Kernels { isa: Isa::detect(), threads: 2 };
    let pages = layout.pages(model.config(), (0, 0), 128 << 20).expect("a context fits");
    let load = || {
        LocalFabric::load(&model, &layout, pages, kernels, false, &mut |_, _| ())
            .expect("the engine loads")
    };
    let run = |fabric: Box<dyn Fabric>, cases: &[Case]| {
        let mut engine = Engine::new(fabric, model.config(), &layout, vec![pages; 2], setting());
        for (index, case) in cases.iter().enumerate() {
            let prompt = Prompt {
                tokens: case.prompt_ids.clone(),
                tokens_max: case.greedy_ids.len() as u32,
                stop_ids: model.config().eos_tokens.clone(),
                ..Prompt::default()
            };
            assert_eq!(engine.submit(prompt), Ok(PromptId(index as u64)));
        }
        completions(&mut engine)
    };
    let outputs = run(Box::new(load()), &cases);
    for (index, case) in cases.iter().enumerate() {
        let got = &outputs[&(index as u64)];
        assert_eq!(got[..case.sure_steps], case.greedy_ids[..case.sure_steps], "{}", case.id);
    }
    let few = &cases[..cases.len().min(4)];
    let relaunched = run(Box::new(Relaunching(load())), few);
    for (id, tokens) in &relaunched {
        assert_eq!(
            tokens, &outputs[id],
            "{}: with every step launched twice",
            cases[*id as usize].id
        );
    }
}
