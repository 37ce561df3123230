//! Times and numbers for people.

/// A time in the unit that fits.
pub fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{:.1} us", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        seconds if seconds < 600.0 => format!("{seconds:.1} s"),
        seconds if seconds < 36_000.0 => format!("{:.1} min", seconds / 60.0),
        seconds => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A number of things: `1 flight`, `2 flights`.
pub fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_the_unit_that_fits() {
        for (seconds, expected) in [
            (3.6e-6, "3.6 us"),
            (0.0421, "42.1 ms"),
            (1.0, "1.0 s"),
            (599.0, "599.0 s"),
            (600.0, "10.0 min"),
            (36_000.0, "10.0 h"),
        ] {
            assert_eq!(time(seconds), expected);
        }
        assert_eq!([counted(1, "flight"), counted(2, "flight")], ["1 flight", "2 flights"]);
    }
}
