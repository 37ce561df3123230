//! Every encoding against golden blocks, and the rounding to bf16.

use super::*;

const ALL: [Encoding; 13] = [
    Encoding::F32,
    Encoding::F16,
    Encoding::BF16,
    Encoding::Q8_0,
    Encoding::Q4_0,
    Encoding::Q4_1,
    Encoding::Q5_0,
    Encoding::Q5_1,
    Encoding::Q2_K,
    Encoding::Q3_K,
    Encoding::Q4_K,
    Encoding::Q5_K,
    Encoding::Q6_K,
];

struct Golden {
    encoding: Encoding,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn golden() -> Vec<Golden> {
    let lines = include_str!("golden.txt").lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let mut words = line.split(' ');
        let name = words.next().unwrap();
        let encoding = ALL.into_iter().find(|encoding| format!("{encoding:?}") == name).unwrap();
        let bytes = hex(words.next().unwrap());
        let values = hex(words.next().unwrap());
        let values = values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        Golden { encoding, bytes, values: values.collect() }
    };
    lines.map(parse).collect()
}

#[test]
fn every_encoding_decodes_its_golden_blocks_exactly() {
    let golden = golden();
    for encoding in ALL {
        let blocks: Vec<_> = golden.iter().filter(|golden| golden.encoding == encoding).collect();
        assert_eq!(blocks.len(), 2, "{encoding:?}");
        // Both blocks in one call, so that the stride between blocks is tested too.
        let bytes: Vec<u8> = blocks.iter().flat_map(|golden| golden.bytes.clone()).collect();
        let expected: Vec<f32> = blocks.iter().flat_map(|golden| golden.values.clone()).collect();
        let mut values = vec![0.0; expected.len()];
        encoding.decode(&bytes, &mut values);
        assert_eq!(values, expected, "{encoding:?}");
        let mut rounded = vec![bf16::ZERO; expected.len()];
        encoding.decode_bf16(&bytes, &mut rounded);
        let expected: Vec<bf16> = expected.into_iter().map(bf16::from_f32).collect();
        assert_eq!(rounded, expected, "{encoding:?}");
    }
}

#[test]
fn rows_longer_than_a_step_are_decoded_whole() {
    let blocks = golden();
    let block = blocks.iter().find(|golden| golden.encoding == Encoding::Q4_1).unwrap();
    let bytes = block.bytes.repeat(19);
    let mut rounded = vec![bf16::ZERO; 19 * 32];
    Encoding::Q4_1.decode_bf16(&bytes, &mut rounded);
    let expected: Vec<bf16> = block.values.iter().map(|value| bf16::from_f32(*value)).collect();
    assert_eq!(rounded, expected.repeat(19));
}

#[test]
fn rounding_goes_to_the_nearest_bf16_and_ties_to_even() {
    for (value, expected) in [
        (0x3f80_0000, 0x3f80),     // 1 is exact
        (0x3f80_7fff, 0x3f80),     // just below the middle
        (0x3f80_8000, 0x3f80),     // the middle above an even mantissa
        (0x3f81_8000, 0x3f82),     // the middle above an odd mantissa
        (0x3f80_8001, 0x3f81),     // just above the middle
        (0xbf81_8000_u32, 0xbf82), // and the same below zero
        (0x7f7f_ffff, 0x7f80),     // the largest finite value goes to infinity
        (0x7f80_0000, 0x7f80),     // infinity stays
        (0x7f80_0001, 0x7fc0),     // a NaN stays one, and becomes quiet
        (0xffff_ffff, 0xffff),     // whatever its sign and mantissa
    ] {
        let mut rounded = [bf16::ZERO];
        Encoding::F32.decode_bf16(&value.to_le_bytes(), &mut rounded);
        assert_eq!(rounded[0].to_bits(), expected, "{value:08x}");
    }
}

#[test]
fn types_that_cannot_be_decoded_are_named() {
    assert_eq!(Encoding::from_gguf(20), Err("IQ4_NL".to_owned()));
    assert_eq!(Encoding::from_gguf(39), Err("MXFP4".to_owned()));
    assert_eq!(Encoding::from_gguf(77), Err("number 77".to_owned()));
    assert_eq!(Encoding::from_safetensors("F8_E4M3"), None);
}

#[test]
fn sizes_that_are_not_whole_blocks_or_overflow_have_no_bytes() {
    assert_eq!(Encoding::Q4_1.bytes(33), None);
    assert_eq!(Encoding::F32.bytes(usize::MAX), None);
    assert_eq!(Encoding::Q6_K.bytes(512), Some(420));
}
