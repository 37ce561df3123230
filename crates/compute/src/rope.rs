//! Rotary embedding: cosines and sines of every position seen so far, and the rotation itself.
//!
//! Pair (i, i + d/2) of a head at position p turns by the angle p · frequency[i].

use crate::memory::{LINE_BYTES, Line};
use bytemuck::{Zeroable, cast_slice, cast_slice_mut};
use glinthawk_model::ModelConfig;

/// Positions are added this many at a time.
const GROWTH_POSITIONS: usize = 256;

/// The table of angles; grows with the longest context seen.
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    magnitude: f32,
    /// (positions, 2, head_dim / 2): cosines, then sines, of one position.
    table: Vec<Line>,
}

impl Rope {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        assert_eq!(config.rope_frequencies.len() * 2, config.head_dim, "one frequency per pair");
        Self {
            frequencies: config.rope_frequencies.clone(),
            magnitude: config.rope_magnitude,
            table: Vec::new(),
        }
    }

    /// Makes the table reach `position`.
    pub(crate) fn reach(&mut self, position: u32) {
        let lines = self.lines();
        let known = self.table.len() / lines;
        let wanted = position as usize + 1;
        if wanted <= known {
            return;
        }
        let wanted = wanted.next_multiple_of(GROWTH_POSITIONS);
        self.table.resize(wanted * lines, Line::zeroed());
        let half = self.frequencies.len();
        for position in known..wanted {
            let values: &mut [f32] = cast_slice_mut(&mut self.table[position * lines..][..lines]);
            for (index, frequency) in self.frequencies.iter().enumerate() {
                let angle = f64::from(position as f32 * frequency);
                values[index] = angle.cos() as f32 * self.magnitude;
                values[half + index] = angle.sin() as f32 * self.magnitude;
            }
        }
    }

    /// Lines of one position.
    fn lines(&self) -> usize {
        2 * self.frequencies.len() * size_of::<f32>() / LINE_BYTES
    }

    /// Cosines, then sines, of a position reached before.
    pub(crate) fn angles(&self, position: u32) -> &[f32] {
        let lines = self.lines();
        cast_slice(&self.table[lines * position as usize..][..lines])
    }
}

/// Rotates one head in place by its angles: cosines, then sines.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], angles: &[f32]) {
    let (low, high) = head.split_at_mut(angles.len() / 2);
    let (cosines, sines) = angles.split_at(angles.len() / 2);
    for (((low, high), cosine), sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        let (a, b) = (*low, *high);
        *low = a * cosine - b * sine;
        *high = b * cosine + a * sine;
    }
}
