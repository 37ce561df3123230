//! The catalogue's efficiencies are those that the reproduction of the paper fits.

use glinthawk_plan::Catalogue;
use glinthawk_reproduce::Testbed;

#[test]
fn the_catalogue_has_the_fitted_efficiencies() {
    let testbed = Testbed::calibrated().expect("the built-in data");
    let catalogue = Catalogue::built_in();
    let fitted: Vec<_> =
        catalogue.devices.iter().filter(|device| device.efficiency_source.is_some()).collect();
    assert_eq!(fitted.len(), 6);
    for device in fitted {
        let (kept, found) = (device.efficiency, testbed.device(&device.name).efficiency);
        for (what, kept, found) in [
            ("weights_bandwidth", kept.weights_bandwidth, found.weights_bandwidth),
            ("matrix", kept.matrix, found.matrix),
            ("context_bandwidth", kept.context_bandwidth, found.context_bandwidth),
            ("vector", kept.vector, found.vector),
        ] {
            let name = &device.name;
            assert!((kept - found).abs() < 6e-4, "{name}: {what} is {kept}, the fit gives {found}");
        }
    }
}
