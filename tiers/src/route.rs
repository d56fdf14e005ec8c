//! Which way bytes take between two tiers: one pure function.

use crate::Capability;

/// How a copy between two tiers runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// One side is host memory, so the other reads from it or writes to it in place.
    Direct,
    /// Through a staging buffer: neither side can address the other's memory.
    ViaHost,
}

/// The route for a copy, from the capabilities of its two ends. Two device tiers still meet in the host's memory:
/// peer-to-peer copies between devices would be their own mover.
pub fn route(from: Capability, to: Capability) -> Route {
    if from.host_addressable || to.host_addressable {
        Route::Direct
    } else {
        Route::ViaHost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_kinds() {
        let device = Capability { device_addressable: true, ..Capability::default() };
        let dram = Capability { host_addressable: true, ..Capability::default() };
        let disk = Capability { durable: true, ..Capability::default() };
        let remote = Capability { durable: true, shared: true, ..Capability::default() };
        use Route::{Direct, ViaHost};
        let expected = [
            (device, device, ViaHost),
            (device, dram, Direct),
            (device, disk, ViaHost),
            (device, remote, ViaHost),
            (dram, device, Direct),
            (dram, dram, Direct),
            (dram, disk, Direct),
            (dram, remote, Direct),
            (disk, device, ViaHost),
            (disk, dram, Direct),
            (disk, disk, ViaHost),
            (disk, remote, ViaHost),
            (remote, device, ViaHost),
            (remote, dram, Direct),
            (remote, disk, ViaHost),
            (remote, remote, ViaHost),
        ];
        for (from, to, want) in expected {
            assert_eq!(route(from, to), want, "{from:?} -> {to:?}");
        }
    }
}
