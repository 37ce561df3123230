//! Decoding of the K-quants: 256 values in sub-blocks whose scales are quantised as well.

use super::half_at;

/// 16 sub-blocks of 16: `x = d·scale·q − dmin·minimum`, scale and minimum 4 bits each, q 2 bits.
/// Layout: scales 16, quants 64, d f16, dmin f16.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    for (sub_block, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = scale * f32::from(scales[sub_block] & 15);
        let minimum = minimum * f32::from(scales[sub_block] >> 4);
        let (start, shift) = two_bit_place(sub_block);
        for (out, quant) in out.iter_mut().zip(&quants[start..start + 16]) {
            *out = scale * f32::from((quant >> shift) & 3) - minimum;
        }
    }
}

/// 16 sub-blocks of 16: `x = d·(scale − 32)·(q − 4)`, scale 6 bits, q 3 bits.
/// Layout: third bits 32, low two bits 64, scales 12, d f16.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale_all = half_at(block, 108);
    for (sub_block, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low_bits =
            if sub_block < 8 { scales[sub_block] & 15 } else { scales[sub_block - 8] >> 4 };
        let high_bits = (scales[8 + sub_block % 4] >> (2 * (sub_block / 4))) & 3;
        let scale = scale_all * f32::from((low_bits | (high_bits << 4)) as i8 - 32);
        let (start, shift) = two_bit_place(sub_block);
        let high_start = sub_block % 2 * 16;
        for (j, out) in out.iter_mut().enumerate() {
            let third_bit = (high[high_start + j] >> (sub_block / 2)) & 1;
            let quant = ((quants[start + j] >> shift) & 3) | (third_bit << 2);
            *out = scale * f32::from(quant as i8 - 4);
        }
    }
}

/// 8 sub-blocks of 32: `x = d·scale·q − dmin·minimum`, scale and minimum 6 bits each, q 4 bits.
/// Layout: d f16, dmin f16, scales 12, quants 128.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scale_all, minimum_all) = (half_at(block, 0), half_at(block, 2));
    let quants = &block[16..];
    for (sub_block, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = six_bit_pair(&block[4..16], sub_block);
        let (scale, minimum) = (scale_all * scale, minimum_all * minimum);
        let (start, shift) = (sub_block / 2 * 32, sub_block % 2 * 4);
        for (out, quant) in out.iter_mut().zip(&quants[start..start + 32]) {
            *out = scale * f32::from((quant >> shift) & 15) - minimum;
        }
    }
}

/// As `q4_k` with q 5 bits. Layout: d f16, dmin f16, scales 12, fifth bits 32, quants 128.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scale_all, minimum_all) = (half_at(block, 0), half_at(block, 2));
    let (high, quants) = (&block[16..48], &block[48..]);
    for (sub_block, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = six_bit_pair(&block[4..16], sub_block);
        let (scale, minimum) = (scale_all * scale, minimum_all * minimum);
        let (start, shift) = (sub_block / 2 * 32, sub_block % 2 * 4);
        for (j, out) in out.iter_mut().enumerate() {
            let fifth_bit = (high[j] >> sub_block) & 1;
            let quant = ((quants[start + j] >> shift) & 15) | (fifth_bit << 4);
            *out = scale * f32::from(quant) - minimum;
        }
    }
}

/// 16 sub-blocks of 16: `x = d·scale·(q − 32)`, scale i8, q 6 bits.
/// Layout: low four bits 128, high two bits 64, scales 16, d f16.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale_all = half_at(block, 208);
    for (sub_block, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = scale_all * f32::from(scales[sub_block] as i8);
        // Within each half of 128 values: quarters of 32 share bytes of `low` in pairs
        // (quarter, quarter + 2), and all four share the bytes of `high`.
        let (half, quarter, start) = (sub_block / 8, sub_block / 2 % 4, sub_block % 2 * 16);
        let low_start = half * 64 + quarter % 2 * 32 + start;
        let (high_start, low_shift) = (half * 32 + start, quarter / 2 * 4);
        for (j, out) in out.iter_mut().enumerate() {
            let low_bits = (low[low_start + j] >> low_shift) & 15;
            let high_bits = (high[high_start + j] >> (2 * quarter)) & 3;
            *out = scale * f32::from((low_bits | (high_bits << 4)) as i8 - 32);
        }
    }
}

/// First byte and shift of a 16-value sub-block of two-bit quants: 128 values share 32 bytes.
fn two_bit_place(sub_block: usize) -> (usize, usize) {
    (sub_block / 8 * 32 + sub_block % 2 * 16, sub_block / 2 % 4 * 2)
}

/// Scale and minimum of one of eight sub-blocks, 6 bits each, packed into 12 bytes.
fn six_bit_pair(packed: &[u8], sub_block: usize) -> (f32, f32) {
    let (scale, minimum) = if sub_block < 4 {
        (packed[sub_block] & 63, packed[sub_block + 4] & 63)
    } else {
        let low = packed[sub_block + 4];
        let scale_high = packed[sub_block - 4] >> 6;
        let minimum_high = packed[sub_block] >> 6;
        ((low & 15) | (scale_high << 4), (low >> 4) | (minimum_high << 4))
    };
    (f32::from(scale), f32::from(minimum))
}
