//! Random weights from a counter hash: any rows of any tensor, at once and in any order.

use crate::weights::{LayerTensor, Tensor};
use half::bf16;
use std::ops::Range;

const SEED: u64 = 0x676c_696e_7468_6177;

/// Sign and mantissa bits of four bf16 values.
const SIGNS_AND_MANTISSAS: u64 = 0x807f_807f_807f_807f;

/// Root mean square of `±(1 + u)`, u uniform in [0, 1): `sqrt(7/3)`.
const MANTISSA_RMS: f64 = 1.527_525_231_651_946_7;

/// Rows of a random matrix with root mean square about `1 / sqrt(inputs)`: (rows, inputs).
/// Four values are one hash with the exponents put in, because a large shape has 10^11 of them.
pub(crate) fn fill_rows(tensor: Tensor, inputs: usize, rows: Range<usize>, out: &mut [bf16]) {
    let exponent = (1.0 / ((inputs as f64).sqrt() * MANTISSA_RMS)).log2().round() as i64;
    let exponents = ((exponent + 127) as u64) << 7;
    let exponents = exponents * 0x0001_0001_0001_0001;
    let seed = mix(SEED ^ mix(number(tensor)));
    let hashes_per_row = inputs.div_ceil(4) as u64;
    for (row, out) in rows.zip(out.chunks_mut(inputs)) {
        let first = seed.wrapping_add(row as u64 * hashes_per_row);
        let four = |index: usize| {
            let bits = (mix(first.wrapping_add(index as u64)) & SIGNS_AND_MANTISSAS) | exponents;
            [0, 16, 32, 48].map(|shift| bf16::from_bits((bits >> shift) as u16))
        };
        let (whole, rest) = out.as_chunks_mut::<4>();
        for (index, out) in whole.iter_mut().enumerate() {
            *out = four(index);
        }
        rest.copy_from_slice(&four(whole.len())[..rest.len()]);
    }
}

/// A norm's weights, between 15/16 and 17/16.
pub(crate) fn vector(tensor: Tensor, length: usize) -> Vec<f32> {
    let seed = mix(SEED ^ mix(number(tensor)));
    (0..length as u64)
        .map(|index| {
            let uniform = (mix(seed.wrapping_add(index)) >> 40) as f32 / (1 << 24) as f32;
            1.0 + (uniform - 0.5) / 8.0
        })
        .collect()
}

/// A number of its own for each tensor.
fn number(tensor: Tensor) -> u64 {
    match tensor {
        Tensor::Embedding => 0,
        Tensor::FinalNorm => 1,
        Tensor::Classifier => 2,
        Tensor::Layer(layer, tensor) => {
            let place = LayerTensor::ALL.iter().position(|&other| other == tensor);
            let place = place.expect("ALL holds every tensor of a layer");
            ((layer as u64 + 1) << 8) | place as u64
        }
    }
}

/// Spreads every input bit over all output bits (the finaliser of splitmix64).
fn mix(counter: u64) -> u64 {
    let bits = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
