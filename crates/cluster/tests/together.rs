//! The strands of one process come together and part while a job runs, and nobody's tokens change.

mod engine_support;

use engine_support::{completions, setting};
use glinthawk_cluster::{Engine, Kernels, Layout, LocalFabric, NodeReport};
use glinthawk_compute::{ContextType, Isa};
use glinthawk_model::Model;
use glinthawk_protocol::Prompt;
use std::collections::BTreeMap;

const STRANDS: usize = 3;

fn layout(strands: usize, flights: u32) -> Layout {
    Layout {
        pipelines: 1,
        slices: 1,
        tier2: 0,
        tier1_attends: true,
        strands,
        batch: 64,
        flights,
        own_batch: None,
        own_first: false,
        chunk: 64,
        page_positions: 32,
        context_max: 1024,
        context_type: ContextType::Bf16,
        whole_flights: false,
        shares_cores: false,
        sharing: true,
        drafts: None,
    }
}

/// Long prompts for all lanes, whose answers end at different times. The last ones are alone for long. Then others come,
/// of which some begin like the first.
fn crowds(vocab: u32) -> [Vec<Prompt>; 2] {
    let prompt = |number: u32| {
        let tokens = (0..150 + 40 * (number % 5)).map(|at| (at * 31 + number % 7 * 97) % vocab);
        let tokens_max = if number % 9 == 4 { 120 } else { 3 + number % 4 * 8 };
        Prompt { tokens: tokens.collect(), tokens_max, ..Prompt::default() }
    };
    [(0..12).map(prompt).collect(), (5..20).map(prompt).collect()]
}

/// The tokens of every prompt, and what every node did.
fn run(isa: Isa, strands: usize, flights: u32) -> (BTreeMap<u64, Vec<u32>>, Vec<NodeReport>) {
    let model = Model::dummy("tiny").expect("a known shape");
    let layout = layout(strands, flights);
    let pages = layout.pages(model.config(), (0, 0), 64 << 20).expect("a context fits");
    let kernels = Kernels { isa, threads: strands };
    let fabric = LocalFabric::load(&model, &layout, pages, kernels, false, &mut |_, _| ())
        .expect("the engine loads");
    let lane_pages = vec![pages; strands];
    let mut engine = Engine::new(Box::new(fabric), model.config(), &layout, lane_pages, setting());
    let mut outputs = BTreeMap::new();
    for crowd in crowds(model.config().vocab as u32) {
        for prompt in crowd {
            engine.submit(prompt).expect("it fits");
        }
        outputs.extend(completions(&mut engine));
    }
    let (_, reports) = engine.stats().expect("all nodes report");
    (outputs, reports)
}

#[test]
fn strands_come_together_and_part_with_the_same_tokens() {
    for isa in Isa::available() {
        let (alone, reports) = run(isa, 1, 1);
        assert_eq!(reports.len(), 2, "both tiers of the one strand");
        for flights in [1, 2] {
            let (outputs, reports) = run(isa, STRANDS, flights);
            assert_eq!(outputs, alone, "{isa:?}, {flights} flights");
            let batches = |name: &str| {
                let report = reports.iter().find(|report| report.name == name);
                report.map_or(0, |report| report.batches)
            };
            let apart: Vec<u64> =
                (0..STRANDS).map(|strand| batches(&format!("tier1-0-{strand}"))).collect();
            let together = batches("tier1-0");
            println!("{isa:?}, {flights} flights: {apart:?} batches apart, {together} together");
            assert!(together > 0 && apart.iter().all(|apart| *apart > 0));
            assert_eq!(reports.iter().filter(|report| report.tier == 2).count(), STRANDS);
        }
    }
}
