#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| glinthawk_fuzz::config(data));
