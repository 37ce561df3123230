//! What a user is told about GPUs on a machine without one: by the loader's path, with libraries that are there by name.

use crate::common::{Finished, TINY, glinthawk};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Some library that can be loaded.
fn any_library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux");
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let library = paths.map(Path::new).find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libgcc_s.so"))
    });
    library.expect("every Rust program has it").to_owned()
}

fn with_libraries<'a>(command: &'a mut Command, folder: &Path, names: &[&str]) -> &'a mut Command {
    for name in names {
        std::fs::copy(any_library(), folder.join(name)).expect("a copy");
    }
    command.env("LD_LIBRARY_PATH", folder)
}

fn generate(device: &str) -> Command {
    let mut command =
        glinthawk(["generate", "hello", "--model", TINY, "--max-tokens", "2", "--device", device]);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

#[test]
fn what_is_missing_is_named() {
    let listed = Finished::of(&mut glinthawk(["devices"])).expect(0).stdout;
    if !listed.contains("libcuda.so") {
        println!("skipped: there is a driver");
        return;
    }
    let cases: [(&[&str], &str); 3] = [
        (&[], "libcuda.so"),
        (&["libcuda.so"], "libcublasLt.so"),
        (&["libcuda.so", "libcublasLt.so"], "libnvrtc.so"),
    ];
    for (there, missing) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let mut asked = generate("cuda:0");
        let refused = Finished::of(with_libraries(&mut asked, folder.path(), there)).expect(1);
        let complaint = &refused.stderr;
        assert!(complaint.contains(missing) && complaint.contains("--device cpu"), "{complaint}");
        let mut auto = generate("auto");
        let ran = Finished::of(with_libraries(&mut auto, folder.path(), there)).expect(0);
        // Without a driver nobody expects a GPU to be used.
        let told = ran.stderr.matches(missing).count();
        assert_eq!(told, usize::from(!there.is_empty()), "{}", ran.stderr);
    }
}
