//! How weights are stored, and decoding of the plain and 32-value block types to f32.
//! The K-quants' 256-value blocks live in `k_quants`.

mod k_quants;

use half::{bf16, f16};

/// Values in the largest block of any encoding.
const BLOCK_VALUES_MAX: usize = 256;

/// A stored type: blocks of a fixed number of values in a fixed number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the formats' own names")]
pub(crate) enum Encoding {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Encoding {
    /// The encoding with this safetensors name.
    pub(crate) fn from_safetensors(dtype: &str) -> Option<Self> {
        match dtype {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::BF16),
            _ => None,
        }
    }

    /// The encoding with this GGUF type number, or the name of a type that is not supported.
    pub(crate) fn from_gguf(number: u32) -> Result<Self, String> {
        let encoding = match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2_K,
            11 => Self::Q3_K,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            other => return Err(unsupported_gguf_name(other)),
        };
        Ok(encoding)
    }

    /// Values in one block.
    pub(crate) fn block_values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of `values` consecutive values; `None` if they do not fill whole blocks or overflow.
    pub(crate) fn bytes(self, values: usize) -> Option<usize> {
        if !values.is_multiple_of(self.block_values()) {
            return None;
        }
        (values / self.block_values()).checked_mul(self.block_bytes())
    }

    /// Decodes whole blocks to f32.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(self.bytes(out.len()), Some(bytes.len()), "whole blocks of {self:?}");
        match self {
            Self::F32 => blocks(bytes, out, |block, out: &mut [f32; 1]| {
                out[0] = f32::from_le_bytes(*block);
            }),
            Self::F16 => blocks(bytes, out, |block, out: &mut [f32; 1]| {
                out[0] = f16::from_le_bytes(*block).to_f32();
            }),
            Self::BF16 => blocks(bytes, out, |block, out: &mut [f32; 1]| {
                out[0] = bf16::from_le_bytes(*block).to_f32();
            }),
            Self::Q8_0 => blocks(bytes, out, q8_0),
            Self::Q4_0 => blocks(bytes, out, q4_0),
            Self::Q4_1 => blocks(bytes, out, q4_1),
            Self::Q5_0 => blocks(bytes, out, q5_0),
            Self::Q5_1 => blocks(bytes, out, q5_1),
            Self::Q2_K => blocks(bytes, out, k_quants::q2_k),
            Self::Q3_K => blocks(bytes, out, k_quants::q3_k),
            Self::Q4_K => blocks(bytes, out, k_quants::q4_k),
            Self::Q5_K => blocks(bytes, out, k_quants::q5_k),
            Self::Q6_K => blocks(bytes, out, k_quants::q6_k),
        }
    }

    /// Decodes whole blocks, rounding to the nearest bf16, ties to even.
    pub(crate) fn decode_bf16(self, bytes: &[u8], out: &mut [bf16]) {
        if self == Self::BF16 {
            assert_eq!(self.bytes(out.len()), Some(bytes.len()), "whole values");
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*bytes);
            }
            return;
        }
        let mut values = [0.0; BLOCK_VALUES_MAX];
        let step_bytes = BLOCK_VALUES_MAX / self.block_values() * self.block_bytes();
        for (bytes, out) in bytes.chunks(step_bytes).zip(out.chunks_mut(BLOCK_VALUES_MAX)) {
            let values = &mut values[..out.len()];
            self.decode(bytes, values);
            for (out, value) in out.iter_mut().zip(values) {
                *out = bf16::from_f32(*value);
            }
        }
    }
}

/// Runs `decode` over all blocks of `BYTES` bytes and `VALUES` values.
fn blocks<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (block, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<VALUES>().0) {
        decode(block, out);
    }
}

/// The f16 at a byte offset of a block.
fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// `x = d·q`; d f16, q 32 × i8.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, quant) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(*quant as i8);
    }
}

/// `x = d·(q − 8)`; d f16, q 32 × 4 bits, low nibbles first.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for j in 0..16 {
        let quants = block[2 + j];
        out[j] = scale * f32::from((quants & 15) as i8 - 8);
        out[j + 16] = scale * f32::from((quants >> 4) as i8 - 8);
    }
}

/// `x = d·q + m`; d, m f16, q 32 × 4 bits, low nibbles first.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for j in 0..16 {
        let quants = block[4 + j];
        out[j] = scale * f32::from(quants & 15) + minimum;
        out[j + 16] = scale * f32::from(quants >> 4) + minimum;
    }
}

/// `x = d·(q − 16)`; d f16, fifth bits as one u32, q 32 × 4 bits, low nibbles first.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for j in 0..16 {
        let quants = block[6 + j];
        out[j] = scale * f32::from(((quants & 15) | fifth_bit(high, j)) as i8 - 16);
        out[j + 16] = scale * f32::from(((quants >> 4) | fifth_bit(high, j + 16)) as i8 - 16);
    }
}

/// `x = d·q + m`; d, m f16, fifth bits as one u32, q 32 × 4 bits, low nibbles first.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for j in 0..16 {
        let quants = block[8 + j];
        out[j] = scale * f32::from((quants & 15) | fifth_bit(high, j)) + minimum;
        out[j + 16] = scale * f32::from((quants >> 4) | fifth_bit(high, j + 16)) + minimum;
    }
}

/// Bit `index` of `high`, moved to where the fifth bit of a quant belongs.
fn fifth_bit(high: u32, index: usize) -> u8 {
    ((high >> index) as u8 & 1) << 4
}

/// Name of a GGUF type number that no decoder here knows.
fn unsupported_gguf_name(number: u32) -> String {
    let name = match number {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("number {number}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests;
