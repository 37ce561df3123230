//! Measured kernel profiles: the JSON that `glinthawk profile` writes.

use crate::curve::{check_attention, check_curve, seconds_at};
use crate::error::{PlanError, read_text, write_text};
use crate::shape::Shape;
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use crate::curve::{AttentionCurve, Curve, Point, batch_ladder, interpolate};

/// The version of the file format this code reads and writes.
pub const PROFILE_VERSION: u32 = 2;

/// No overhead takes longer, in seconds: a larger one is a mistake.
const OVERHEAD_MAX: f64 = 60.0;

/// Where and when a profile was taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The machine, in words.
    pub machine: String,
    /// What the kernels run on: an instruction set such as `amx`, or a kind of GPU such as `cuda-sm90`.
    pub instruction_set: String,
    /// Threads the kernels ran on; 1 for a GPU, whose kernels one thread queues.
    pub threads: usize,
    /// Date, ISO 8601.
    pub date: String,
    /// Version of the program that measured.
    pub version: String,
}

/// The model dimensions a profile holds for; kernels of another shape need another profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileShape {
    /// Model name.
    pub model: String,
    /// Activation width.
    pub hidden: usize,
    /// Width of the queries.
    pub query_width: usize,
    /// Width of the keys.
    pub kv_width: usize,
    /// Feed-forward width.
    pub feed_forward: usize,
    /// Vocabulary.
    pub vocab: usize,
}

/// The engine's work around the kernels, in seconds of one core; all zero if it was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overheads {
    /// Planning, launching and taking home one step of a shard.
    #[serde(rename = "step")]
    pub step_seconds: f64,
    /// The same for each of its rows.
    #[serde(rename = "row")]
    pub row_seconds: f64,
    /// Sending a message to another process or receiving one, each.
    #[serde(rename = "message")]
    pub message_seconds: f64,
    /// The same on a core that reads other memory in between, as kernels do. Not less than without.
    #[serde(rename = "message_beside_kernels", default)]
    pub message_beside_kernels_seconds: f64,
    /// The same for each of its bytes.
    #[serde(rename = "byte")]
    pub byte_seconds: f64,
    /// The same while other cores read memory, as they do when they attend. Not less than without.
    #[serde(rename = "byte_beside_reading", default)]
    pub byte_beside_reading_seconds: f64,
    /// Waking a receiver that sleeps on an idle core.
    #[serde(rename = "wake")]
    pub wake_seconds: f64,
    /// Waiting for a core on which another process computes.
    #[serde(rename = "crowded", default)]
    pub crowded_seconds: f64,
    /// By which part of their time the threads take longer to read memory while messages are sent and received, if they
    /// leave cores to these.
    #[serde(default)]
    pub slower_beside_messages: f64,
}

/// Seconds of every stage of one layer on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// File format version.
    pub version: u32,
    /// What was measured where and when.
    pub provenance: Provenance,
    /// What shape it holds for.
    pub shape: ProfileShape,
    /// Norm, q/k/v projection, rotary embedding.
    pub pre: Curve,
    /// Output projection, feed-forward.
    pub post: Curve,
    /// A layer's post fused with the next layer's pre.
    pub fused: Curve,
    /// The same in a step that a device is given at once, for batches so small that this matters; empty on cores.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fused_at_once: Curve,
    /// Final norm, classifier, the likeliest token.
    pub classify: Curve,
    /// Final norm, classifier, all logits, a token drawn from them; if empty, `classify` is used.
    #[serde(default)]
    pub logits: Curve,
    /// Append and attend, one row of each prompt, by ascending context length.
    pub attention: Vec<AttentionCurve>,
    /// Append and attend, all rows of one prompt among as many as fill a batch, by ascending context length after them;
    /// if empty, `attention` is used.
    #[serde(default)]
    pub prefill: Vec<AttentionCurve>,
    /// Copying q, k and v to the host; empty where the kernels work in the host's memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to_host: Curve,
    /// Copying attention's output to the device; empty likewise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to_device: Curve,
    /// What the engine does around the kernels.
    #[serde(default)]
    pub overheads: Overheads,
}

impl Profile {
    /// Reads and checks a profile.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        Self::parse(&path.display().to_string(), &read_text(path)?)
    }

    /// Parses and checks a profile; `path` is for messages.
    pub fn parse(path: &str, text: &str) -> Result<Self, PlanError> {
        let profile: Self = serde_json::from_str(text).map_err(|error| PlanError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        profile.check(path)?;
        Ok(profile)
    }

    /// Writes the profile as JSON, a line for each field.
    pub fn write(&self, path: &Path) -> Result<(), PlanError> {
        let value = serde_json::to_value(self).expect("a profile is plain data");
        let fields = value.as_object().expect("a profile has fields").iter();
        let lines: Vec<String> =
            fields.map(|(name, value)| format!("{}: {value}", serde_json::json!(name))).collect();
        write_text(path, &format!("{{\n{}\n}}\n", lines.join(",\n")))
    }

    fn check(&self, path: &str) -> Result<(), PlanError> {
        if self.version != PROFILE_VERSION {
            let problem = format!("is {}, this program reads {PROFILE_VERSION}", self.version);
            return Err(PlanError::field(path, "version", problem));
        }
        let stages = [
            ("pre", &self.pre),
            ("post", &self.post),
            ("fused", &self.fused),
            ("classify", &self.classify),
        ];
        for (name, curve) in stages {
            check_curve(path, name, curve)?;
        }
        let optional = [
            ("fused_at_once", &self.fused_at_once),
            ("logits", &self.logits),
            ("to_host", &self.to_host),
            ("to_device", &self.to_device),
        ];
        for (name, curve) in optional.into_iter().filter(|(_, curve)| !curve.is_empty()) {
            check_curve(path, name, curve)?;
        }
        if self.attention.is_empty() {
            return Err(PlanError::field(path, "attention", "has no context length"));
        }
        check_attention(path, "attention", &self.attention)?;
        check_attention(path, "prefill", &self.prefill)?;
        self.overheads.check(path)
    }

    /// Rejects a profile that was measured for another shape.
    pub fn check_shape(&self, path: &str, wanted: &Shape) -> Result<(), PlanError> {
        let measured = &self.shape;
        let same = measured.hidden == wanted.hidden
            && measured.query_width == wanted.query_width
            && measured.kv_width == wanted.kv_width
            && measured.feed_forward == wanted.feed_forward
            && measured.vocab == wanted.vocab;
        if same {
            return Ok(());
        }
        let (of, model) = (&measured.model, &wanted.name);
        let problem = format!("was measured for {of}, whose shape is not that of {model}");
        Err(PlanError::field(path, "shape", problem))
    }

    /// Seconds for `rows` rows of as many prompts attending to `context` positions each, linear in both.
    pub fn attention_seconds(&self, rows: usize, context: f64) -> f64 {
        seconds_at(&self.attention, rows, context)
    }

    /// Seconds for the last `rows` rows of one prompt of `context` positions, linear in both.
    pub fn prefill_seconds(&self, rows: usize, context: f64) -> f64 {
        match self.prefill.is_empty() {
            true => self.attention_seconds(rows, context - rows as f64 / 2.0),
            false => seconds_at(&self.prefill, rows, context),
        }
    }
}

impl Overheads {
    fn check(&self, path: &str) -> Result<(), PlanError> {
        let parts = [
            ("step", self.step_seconds),
            ("row", self.row_seconds),
            ("message", self.message_seconds),
            ("message_beside_kernels", self.message_beside_kernels_seconds),
            ("byte", self.byte_seconds),
            ("byte_beside_reading", self.byte_beside_reading_seconds),
            ("wake", self.wake_seconds),
            ("crowded", self.crowded_seconds),
            ("slower_beside_messages", self.slower_beside_messages),
        ];
        for (field, value) in parts {
            if !(0.0..=OVERHEAD_MAX).contains(&value) {
                let problem = format!("must be from 0 to {OVERHEAD_MAX}, is {value:?}");
                return Err(PlanError::field(path, format!("overheads.{field}"), problem));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A profile whose seconds follow given lines: seconds = base + slope · batch.
    pub(crate) fn linear(base: f64, slope: f64) -> Profile {
        let curve = |scale: f64| {
            let point = |batch| Point {
                batch,
                seconds: scale * (base + slope * batch as f64),
                spread: 0.0,
            };
            batch_ladder(4096).into_iter().map(point).collect::<Curve>()
        };
        Profile {
            version: PROFILE_VERSION,
            provenance: Provenance {
                machine: "test".into(),
                instruction_set: "none".into(),
                threads: 1,
                date: "2025-01-01".into(),
                version: "0".into(),
            },
            shape: ProfileShape {
                model: "test".into(),
                hidden: 8,
                query_width: 8,
                kv_width: 8,
                feed_forward: 8,
                vocab: 8,
            },
            pre: curve(0.25),
            post: curve(0.75),
            fused: curve(1.0),
            fused_at_once: Vec::new(),
            classify: curve(0.3),
            attention: vec![
                AttentionCurve { context: 128, points: curve(0.5) },
                AttentionCurve { context: 1024, points: curve(4.0) },
            ],
            logits: curve(0.6),
            prefill: vec![AttentionCurve { context: 1024, points: curve(1.0) }],
            to_host: Vec::new(),
            to_device: Vec::new(),
            overheads: Overheads::default(),
        }
    }

    #[test]
    fn attention_is_linear_in_context() {
        let profile = linear(1e-3, 1e-4);
        let (short, long) =
            (profile.attention_seconds(8, 128.0), profile.attention_seconds(8, 1024.0));
        assert!((long / short - 8.0).abs() < 1e-9);
        assert!((profile.attention_seconds(8, 576.0) - (short + long) / 2.0).abs() < 1e-12);
    }

    #[test]
    fn bad_files_name_the_field() {
        let good = serde_json::to_value(linear(1e-3, 1e-4)).expect("plain data");
        let cases: [(&str, &str, serde_json::Value); 8] = [
            ("/version", "version", 9.into()),
            ("/pre/3/batch", "pre[3].batch", 1.into()),
            ("/attention/1/points/0/seconds", "attention[1].points[0].seconds", (-1.0).into()),
            ("/attention/0/context", "attention[0].context", 0.into()),
            ("/prefill/0/points/2/spread", "prefill[0].points[2].spread", (-1.0).into()),
            ("/logits/1/seconds", "logits[1].seconds", 0.into()),
            ("/overheads/wake", "overheads.wake", (-1.0).into()),
            ("/overheads/byte", "overheads.byte", 1e308.into()),
        ];
        for (pointer, field, value) in cases {
            let mut bad = good.clone();
            *bad.pointer_mut(pointer).expect("in the file") = value;
            let error = Profile::parse("p.json", &bad.to_string()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("p.json: {field}: ")), "{error}");
        }
        assert!(Profile::parse("p.json", &good.to_string()).is_ok());
    }
}
