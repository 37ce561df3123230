//! How much memory this process may still take: what the machine has free, and what the cgroups it is in allow.

use std::path::Path;

/// Memory that this process can take without swapping or being killed; `None` if the system does not say.
pub fn free_memory_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = available(&read("/proc/meminfo")?)?;
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let allowed = allowed_by_groups(&groups, Path::new("/sys/fs/cgroup"));
    Some(allowed.map_or(machine, |allowed| allowed.min(machine)))
}

/// What `/proc/meminfo` calls available.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The names that a version of cgroups has for the same things.
struct Files {
    limits: &'static [&'static str],
    used: &'static str,
    /// Pages of files, which are dropped when memory is short.
    reclaimable: [&'static str; 2],
}

const VERSION_1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file ", "total_active_file "],
};

const VERSION_2: Files = Files {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    reclaimable: ["inactive_file ", "active_file "],
};

/// What the groups in `groups` (the content of `/proc/self/cgroup`) and all above them leave; `None` if none of
/// them has a limit. `mount` is where cgroups are mounted.
fn allowed_by_groups(groups: &str, mount: &Path) -> Option<u64> {
    let mut least = None;
    for group in groups.lines() {
        let mut fields = group.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (roots, files): (&[&str], _) = match controllers {
            // By itself, or beside version 1.
            "" => (&["", "unified"], VERSION_2),
            _ if controllers.split(',').any(|name| name == "memory") => (&["memory"], VERSION_1),
            _ => continue,
        };
        for root in roots {
            let root = mount.join(root);
            // Inside a container the path may be the host's and lead nowhere; the root is the container's then.
            let own = root.join(path.trim_start_matches('/'));
            for folder in own.ancestors().take_while(|folder| folder.starts_with(&root)) {
                least = least.into_iter().chain(allowed_in(folder, &files)).min();
            }
        }
    }
    least
}

/// What one group leaves.
fn allowed_in(folder: &Path, files: &Files) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    // No limit is the word "max", or (in version 1) more than any machine has.
    let limits = files.limits.iter().filter_map(|name| number(read(name)?));
    let limit = limits.min().filter(|limit| *limit < 1 << 60)?;
    let used = read(files.used).and_then(number)?;
    let statistics = read("memory.stat").unwrap_or_default();
    let reclaimable = |line: &str| {
        let value = files.reclaimable.iter().find_map(|name| line.strip_prefix(name))?;
        value.trim().parse::<u64>().ok()
    };
    let reclaimable: u64 = statistics.lines().filter_map(reclaimable).sum();
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// What a tree of these files allows.
    fn check(groups: &str, files: &[(&str, &str)], expected: Option<u64>) {
        let mount = tempfile::TempDir::new().expect("a folder");
        for (path, content) in files {
            let path = mount.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder above")).expect("made");
            fs::write(path, content).expect("written");
        }
        assert_eq!(allowed_by_groups(groups, mount.path()), expected, "{groups} {files:?}");
    }

    #[test]
    fn the_tightest_group_above_decides() {
        let stat = "anon 300\ninactive_file 100\nactive_file 50\nfile 150\n";
        let own = [("a/b/memory.max", "1000\n"), ("a/b/memory.current", "400\n")];
        check("0::/a/b\n", &own, Some(600));
        check("0::/a/b\n", &[&own[..], &[("a/b/memory.stat", stat)]].concat(), Some(750));
        let above = [("a/memory.max", "2000\n"), ("a/memory.current", "1900\n")];
        check("0::/a/b\n", &[&own[..], &above].concat(), Some(100));
        let soft = [("a/b/memory.high", "500\n")];
        check("0::/a/b\n", &[&own[..], &soft].concat(), Some(100));
        let none = [("a/b/memory.max", "max\n"), ("a/b/memory.current", "400\n")];
        check("0::/a/b\n", &none, None);
        check("0::/a/b\n", &[&none[..], &above].concat(), Some(100));
        let over = [("a/b/memory.max", "100\n"), ("a/b/memory.current", "400\n")];
        check("0::/a/b\n", &over, Some(0));
    }

    #[test]
    fn both_versions_are_read() {
        let version_1 = [
            ("memory/a/memory.limit_in_bytes", "1000\n"),
            ("memory/a/memory.usage_in_bytes", "700\n"),
            ("memory/a/memory.stat", "total_inactive_file 200\ninactive_file 7\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.usage_in_bytes", "5000\n"),
        ];
        check("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n", &version_1, Some(500));
        // In a container, the host's path is not there.
        check("4:hugetlb,memory:/docker/0123\n", &version_1, None);
        let container =
            [("memory/memory.limit_in_bytes", "1000\n"), ("memory/memory.usage_in_bytes", "100\n")];
        check("4:memory:/docker/0123\n", &container, Some(900));
        let unified = [("unified/a/memory.max", "1000\n"), ("unified/a/memory.current", "1\n")];
        check("4:memory:/a\n0::/a\n", &unified, Some(999));
        check("", &[], None);
        check("nonsense\n", &[], None);
    }

    #[test]
    fn free_memory_of_a_machine_is_read() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:    2 kB\n"), Some(2048));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        assert!(free_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
