//! The hardware catalogue: devices as data, each figure with its source; users add their own in the same form.

use crate::error::PlanError;
use serde::{Deserialize, Serialize};

const BUILT_IN: &str = include_str!("../data/devices.toml");

/// A number and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The number, in the unit of its field's name.
    pub value: f64,
    /// Datasheet, measurement or derivation.
    pub source: String,
}

/// The part of a device's peaks that kernels reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Of the memory bandwidth while weights are streamed.
    pub weights_bandwidth: f64,
    /// Of the matrix rate.
    pub matrix: f64,
    /// Of the memory bandwidth while contexts are streamed.
    pub context_bandwidth: f64,
    /// Of the vector rate in attention.
    pub vector: f64,
}

impl Default for Efficiency {
    /// Assumptions for a device that was not measured: well-written kernels, not perfect ones.
    fn default() -> Self {
        Self { weights_bandwidth: 0.8, matrix: 0.5, context_bandwidth: 0.7, vector: 0.3 }
    }
}

/// One kind of hardware.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceKind {
    /// Key in cluster files.
    pub name: String,
    /// Name for people.
    pub title: String,
    /// Memory that weights and contexts may use.
    pub memory_gib: Figure,
    /// Memory bandwidth, 10^9 bytes per second.
    pub bandwidth_gb_s: Figure,
    /// Dense matrix rate, 10^12 operations per second.
    pub matrix_tflops: Figure,
    /// f32 vector rate, 10^12 operations per second.
    pub vector_tflops: Figure,
    /// Price of one, if known.
    pub price_usd: Option<Figure>,
    /// Where `efficiency` comes from; none where it is assumed.
    pub efficiency_source: Option<String>,
    /// What kernels reach of the peaks.
    #[serde(default)]
    pub efficiency: Efficiency,
}

/// Devices by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    /// The devices, in the file's order.
    #[serde(default, rename = "device")]
    pub devices: Vec<DeviceKind>,
}

impl Catalogue {
    /// The catalogue that ships with the program.
    pub fn built_in() -> Self {
        Self::parse("devices.toml", BUILT_IN).expect("the built-in catalogue is checked by a test")
    }

    /// Parses and checks a catalogue; `path` is for messages.
    pub fn parse(path: &str, text: &str) -> Result<Self, PlanError> {
        let catalogue: Self = toml::from_str(text).map_err(|error| PlanError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        for device in &catalogue.devices {
            device.check(path)?;
        }
        Ok(catalogue)
    }

    /// Adds devices, replacing those of the same name.
    pub fn extend(&mut self, devices: Vec<DeviceKind>) {
        for device in devices {
            self.devices.retain(|known| known.name != device.name);
            self.devices.push(device);
        }
    }

    /// The device called `name`.
    pub fn get(&self, name: &str) -> Option<&DeviceKind> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// All names, for messages.
    pub fn names(&self) -> String {
        self.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

impl DeviceKind {
    /// Rejects figures that no device can have, naming the field.
    pub fn check(&self, path: &str) -> Result<(), PlanError> {
        let peaks = [
            ("memory_gib", self.memory_gib.value),
            ("bandwidth_gb_s", self.bandwidth_gb_s.value),
            ("matrix_tflops", self.matrix_tflops.value),
            ("vector_tflops", self.vector_tflops.value),
        ];
        for (field, value) in peaks {
            if !(value.is_finite() && value > 0.0) {
                let field = format!("device.{}.{field}", self.name);
                return Err(PlanError::field(path, field, format!("must be above 0, is {value}")));
            }
        }
        let price = self.price_usd.as_ref().map_or(0.0, |figure| figure.value);
        if !(price.is_finite() && price >= 0.0) {
            let field = format!("device.{}.price_usd", self.name);
            return Err(PlanError::field(path, field, format!("must not be negative, is {price}")));
        }
        let parts = [
            ("weights_bandwidth", self.efficiency.weights_bandwidth),
            ("matrix", self.efficiency.matrix),
            ("context_bandwidth", self.efficiency.context_bandwidth),
            ("vector", self.efficiency.vector),
        ];
        for (field, value) in parts {
            if !(value > 0.0 && value <= 1.0) {
                let field = format!("device.{}.efficiency.{field}", self.name);
                return Err(PlanError::field(
                    path,
                    field,
                    format!("must be above 0 and at most 1, is {value}"),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_devices_are_complete_and_sourced() {
        let catalogue = Catalogue::built_in();
        for name in
            ["t4", "rtx6000", "a6000", "a100-40", "h100-80", "h200", "epyc-7v12-16", "xeon-amx-2"]
        {
            let device = catalogue.get(name).unwrap_or_else(|| panic!("{name} is missing"));
            for figure in [
                &device.memory_gib,
                &device.bandwidth_gb_s,
                &device.matrix_tflops,
                &device.vector_tflops,
            ] {
                assert!(!figure.source.is_empty(), "{name}");
            }
        }
    }

    #[test]
    fn bad_figures_are_named() {
        let text = BUILT_IN.replacen("value = 320.0", "value = -1.0", 1);
        let error = Catalogue::parse("mine.toml", &text).unwrap_err().to_string();
        assert_eq!(error, "mine.toml: device.t4.bandwidth_gb_s: must be above 0, is -1");
        let text = BUILT_IN.replacen("bandwidth_gb_s = ", "bandwith = ", 1);
        let error = Catalogue::parse("mine.toml", &text).unwrap_err().to_string();
        assert!(error.contains("bandwith"), "{error}");
    }

    #[test]
    fn a_users_device_replaces_the_built_in() {
        let mut catalogue = Catalogue::built_in();
        let mut mine = catalogue.get("t4").expect("built in").clone();
        mine.memory_gib.value = 15.0;
        catalogue.extend(vec![mine]);
        assert_eq!(catalogue.get("t4").expect("still there").memory_gib.value, 15.0);
        assert_eq!(catalogue.devices.len(), Catalogue::built_in().devices.len());
    }
}
