//! What only the Ascend backend can show: one captured graph across an adapter swap, and the vendor's
//! grouped product. Run on the host twin.
#![cfg(feature = "ascend-twin")]

use amphora_backend_ascend::{Ascend, bundled_twin};
use amphora_hal::{Device, DeviceConfig};

#[path = "ascend/grouped.rs"]
mod grouped;

fn twin() -> Ascend {
    let library = Some(bundled_twin().expect("Cargo builds the twin"));
    Ascend::open(&DeviceConfig { library, ..DeviceConfig::default() }).expect("the twin opens")
}

#[test]
fn a_captured_graph_takes_the_adapter_that_its_slot_holds_now() {
    amphora_tests::swap::one_graph_across_a_swap(&twin());
}
