//! Layouts of all kinds.

use ondeck_core::Bytes;
use ondeck_layout::model::UNIT;
use ondeck_layout::{Component, Layout, Placement, PoolName, StripeCount};
use proptest::option;
use proptest::prelude::*;

/// Any count.
pub fn counts() -> impl Strategy<Value = StripeCount> {
    prop_oneof![
        5 => (1u16..=2000).prop_map(StripeCount::Of),
        1 => Just(StripeCount::All),
        1 => (1u16..=2000).prop_map(StripeCount::Overstriped),
        1 => (2u8..=32).prop_map(StripeCount::PerTarget),
    ]
}

/// Any name of a pool.
pub fn pools() -> impl Strategy<Value = Option<PoolName>> {
    option::weighted(0.3, "[A-Za-z0-9_.][A-Za-z0-9_.-]{0,14}".prop_map(|name| name.parse().unwrap()))
}

/// Any layout of up to six components.
pub fn layouts() -> impl Strategy<Value = Layout> {
    // The units of a stripe, how many such stripes the range has, the rest.
    let range = (1u64..=4096, 1u64..=4096, counts(), pools());
    let last = (1u64..65536, counts(), pools());
    let metadata = option::weighted(0.2, 1u64..=16384);
    (metadata, proptest::collection::vec(range, 0..5), last).prop_map(|(metadata, ranges, last)| {
        let mut components = Vec::new();
        let mut end = 0;
        // A pool goes on until another one is named.
        let mut before = None;
        let mut taken_over = |pool: Option<PoolName>| {
            before = pool.or(before.take());
            before.clone()
        };
        if let Some(units) = metadata {
            end = units * UNIT.0;
            components.push(Component { end: Some(Bytes(end)), placement: Placement::Metadata });
        }
        for (units, stripes, count, pool) in ranges {
            let stripe_size = units * UNIT.0;
            end = (end / stripe_size + stripes) * stripe_size;
            components.push(Component {
                end: Some(Bytes(end)),
                placement: Placement::Striped {
                    count,
                    stripe_size: Bytes(stripe_size),
                    pool: taken_over(pool),
                },
            });
        }
        let (units, count, pool) = last;
        let stripe_size = Bytes(units * UNIT.0);
        let pool = taken_over(pool);
        components.push(Component { end: None, placement: Placement::Striped { count, stripe_size, pool } });
        Layout::new(components).unwrap()
    })
}
