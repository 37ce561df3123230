#![no_main]
#![allow(dead_code, reason = "every target is one of all")]
#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::gguf(data));
