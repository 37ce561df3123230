//! Engines in tests: what they say about themselves does not matter, only their tokens do.

use glinthawk_cluster::{Engine, EngineEvent, Setting};
use std::collections::BTreeMap;

/// Runs an engine until it is idle: every prompt's tokens.
pub fn completions(engine: &mut Engine) -> BTreeMap<u64, Vec<u32>> {
    let mut outputs = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.advance().expect("the engine runs") {
            let EngineEvent::Finished(completion) = event else { panic!("unexpected {event:?}") };
            let tokens = completion.tokens.iter().map(|generated| generated.token);
            outputs.insert(completion.id.0, tokens.collect());
        }
    }
    outputs
}

/// A setting that nobody looks at.
pub fn setting() -> Setting {
    Setting {
        model: String::new(),
        backend: "cpu",
        instruction_set: String::new(),
        threads: 2,
        pipelines: 1,
        tier1_nodes: 1,
        tier2_nodes: 0,
        tier1_attends: true,
        lanes: 2,
        batch: 24,
        flights: 2,
        chunk: 20,
        context_memory_bytes: 0,
        context_type: "bf16",
        page_bytes: 0,
        max_context: 2048,
    }
}
