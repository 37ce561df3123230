//! What crosses between the tiers: q, k, v of every row and layer out, attention output back, and
//! almost nothing else.

use crate::common::Case;
use glinthawk_model::testing;
use serde_json::Value;

/// Shape of the default model.
const LAYERS: u64 = 30;
const HIDDEN: f64 = 576.0;
const KEY_VALUE: f64 = 192.0;

/// What framing may add.
const FRAMING_MAX: f64 = 0.02;

/// Ninety-six that say four tokens each: with one flight of 64 rows on each of two lanes, batches are
/// large but never larger than that.
fn requests() -> String {
    let line = |number: u32| {
        format!(
            "{{\"custom_id\":\"{number}\",\"prompt\":\"One\",\"seed\":{number},\"ignore_eos\":true,\"max_tokens\":4}}\n"
        )
    };
    (0..96).map(line).collect()
}

/// Bytes and rows of a kind of message in one direction, over all nodes whose name begins so.
fn traffic(stats: &Value, tier: &str, direction: &str, kind: &str) -> (u64, u64) {
    let nodes = stats["nodes"].as_array().expect("a list of nodes");
    let nodes =
        nodes.iter().filter(|node| node["name"].as_str().expect("a name").starts_with(tier));
    let counters = nodes.map(|node| &node[direction][kind]);
    let counts = counters.map(|traffic| {
        let count = |field: &str| traffic[field].as_u64().expect("a count");
        (count("bytes"), count("rows"))
    });
    counts.fold((0, 0), |sum, (bytes, rows)| (sum.0 + bytes, sum.1 + rows))
}

#[test]
fn rows_travel_with_hardly_any_framing() {
    let Some(model) = testing::default_model() else { return };
    let model = model.to_str().expect("a path of text").to_owned();
    let case = Case { model, ..Case::new(requests()) };
    let options = ["--tier1", "1", "--tier2", "2", "--flights", "1", "--batch", "64"];
    let memory = ["--context-memory", "64MiB", "--max-context", "64"];
    let (finished, stats) = case.run_with_stats(&[&options[..], &memory].concat());
    finished.expect(0);

    let tokens = |field: &str| stats[field].as_u64().expect("a count");
    // The last token of a completion is not an input.
    let rows = LAYERS * (tokens("prompt_tokens") + tokens("generated_tokens") - tokens("prompts"));
    for (kind, from, to, payload) in [
        ("attend", "tier1", "tier2", 2.0 * (HIDDEN + 2.0 * KEY_VALUE)),
        ("attended", "tier2", "tier1", 2.0 * HIDDEN),
    ] {
        let sent = traffic(&stats, from, "sent", kind);
        assert_eq!(sent, traffic(&stats, to, "received", kind), "{kind}: all that is sent arrives");
        assert_eq!(sent.1, rows, "{kind}: every row of every layer, once");
        let framing = sent.0 as f64 / sent.1 as f64 / payload - 1.0;
        println!(
            "{kind}: {:.1} bytes a row, {:.2}% framing",
            sent.0 as f64 / sent.1 as f64,
            100.0 * framing
        );
        assert!((0.0..FRAMING_MAX).contains(&framing), "{kind}: {:.2}% framing", 100.0 * framing);
    }
}
