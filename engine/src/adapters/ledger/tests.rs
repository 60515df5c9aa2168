//! The rules of residency, one by one and under random use.

use super::*;
use crate::testing::Rng;

fn hot(ledger: &mut Ledger, name: &str) -> (AdapterKey, Slot) {
    let key = ledger.stage(name);
    let slot = ledger.begin_load(&key).unwrap();
    assert!(matches!(ledger.residency(&key), Residency::Coming));
    assert_eq!(ledger.finish_load(&key).unwrap(), slot);
    (key, slot)
}

#[test]
fn a_name_leaves_at_once_and_its_memory_with_the_last_user() {
    let mut ledger = Ledger::new(2);
    let (key, slot) = hot(&mut ledger, "x");
    let pin = ledger.pin("x").unwrap();
    let Residency::Hot(hold) = ledger.residency(&key) else { panic!("not hot") };
    assert_eq!(hold.slot, slot);
    assert_eq!(ledger.retire("x").unwrap(), key);
    assert_eq!(ledger.pin("x").unwrap_err(), LedgerError::Unknown("x".into()));
    ledger.used(slot, Step(5));
    assert!(ledger.sweep(Step(9)).is_empty());
    drop(hold);
    assert!(ledger.sweep(Step(9)).is_empty(), "the request is not answered yet");
    drop(pin);
    assert!(ledger.sweep(Step(4)).is_empty(), "step 5 may still read the blocks");
    assert_eq!(ledger.sweep(Step(5)), std::slice::from_ref(&key));
    assert!(matches!(ledger.residency(&key), Residency::Absent));
    assert!(ledger.list().is_empty());
}

#[test]
fn a_new_version_takes_the_name_and_the_old_one_drains() {
    let mut ledger = Ledger::new(2);
    let (old, _) = hot(&mut ledger, "x");
    let pin = ledger.pin("x").unwrap();
    let (new, _) = hot(&mut ledger, "x");
    assert_ne!(old, new);
    assert_eq!(ledger.pin("x").unwrap().key, new);
    assert!(matches!(ledger.residency(&pin.key), Residency::Hot(_)));
    assert!(ledger.sweep(Step(0)).is_empty());
    drop(pin);
    assert_eq!(ledger.sweep(Step(0)), [old]);
    assert_eq!(ledger.pin("x").unwrap().key, new);
}

#[test]
fn eviction_takes_the_least_recently_used_that_nobody_uses() {
    let mut ledger = Ledger::new(3);
    let (a, slot_a) = hot(&mut ledger, "a");
    let (b, slot_b) = hot(&mut ledger, "b");
    let (c, slot_c) = hot(&mut ledger, "c");
    for (slot, step) in [(slot_a, 1), (slot_b, 2), (slot_c, 7)] {
        ledger.used(slot, Step(step));
    }
    let hold = ledger.residency(&a);
    assert_eq!(ledger.evict(&a, Step(7)), Err(LedgerError::InUse(a.to_string())));
    assert_eq!(ledger.evictable(Step(7), &[]), Some(b.clone()));
    assert_eq!(ledger.evictable(Step(7), std::slice::from_ref(&b)), Some(c.clone()));
    assert_eq!(ledger.evictable(Step(6), std::slice::from_ref(&b)), None);
    drop(hold);
    assert_eq!(ledger.evictable(Step(7), &[]), Some(a.clone()));
    let waiting = ledger.stage("d");
    assert_eq!(ledger.begin_load(&waiting), Err(LedgerError::NoSlot(3)));
    assert_eq!(ledger.evict(&a, Step(7)), Ok(slot_a));
    assert_eq!(ledger.begin_load(&waiting), Ok(slot_a));
}

#[test]
fn random_use_returns_every_reference_once() {
    let mut rng = Rng::new(23);
    let mut ledger = Ledger::new(3);
    let mut users: Vec<(Pin, Option<Hold>)> = Vec::new();
    let mut step = Step(0);
    for _ in 0..4000 {
        let name = ["a", "b", "c", "d", "e"][rng.below(5)];
        match rng.below(8) {
            0 => drop(ledger.stage(name)),
            1 => drop(ledger.retire(name)),
            2 | 3 => users.extend(ledger.pin(name).ok().map(|pin| (pin, None))),
            4 if !users.is_empty() => {
                users.swap_remove(rng.below(users.len()));
            }
            5 if !users.is_empty() => {
                let index = rng.below(users.len());
                let (pin, hold) = &mut users[index];
                if let Residency::Hot(h) = ledger.residency(&pin.key) {
                    step = step.next();
                    ledger.used(h.slot, step);
                    *hold = Some(h);
                }
            }
            _ => {
                let key = users.first().map(|(pin, _)| pin.key.clone());
                if let Some(key) = key.filter(|k| ledger.place(k) == Some(Place::Staged)) {
                    if let Some(victim) = ledger.evictable(step, &[]) {
                        ledger.evict(&victim, step).unwrap();
                    }
                    if ledger.begin_load(&key).is_ok() {
                        ledger.finish_load(&key).unwrap();
                    }
                }
            }
        }
        ledger.sweep(step);
        for (pin, hold) in &users {
            match (ledger.place(&pin.key), hold) {
                (Some(Place::Hot(slot)), Some(hold)) => assert_eq!(slot, hold.slot),
                (Some(_), None) => {}
                (place, hold) => panic!("{place:?} under {hold:?}"),
            }
        }
    }
    users.clear();
    for name in ["a", "b", "c", "d", "e"] {
        drop(ledger.retire(name));
    }
    ledger.sweep(step);
    assert!(ledger.list().is_empty());
    assert!(ledger.slots.iter().all(Option::is_none));
}

#[test]
fn the_list_changes_with_its_revision_and_its_counts_without() {
    let mut ledger = Ledger::new(1);
    let before = ledger.revision();
    let (key, slot) = hot(&mut ledger, "x");
    let revision = ledger.revision();
    assert_ne!(revision, before);
    let line = ledger.list().remove(0);
    let pin = ledger.pin("x").unwrap();
    ledger.used(slot, Step(1));
    drop(ledger.residency(&key));
    assert_eq!((ledger.revision(), line.status().requests), (revision, 1));
    drop(pin);
    assert!(ledger.sweep(Step(1)).is_empty());
    assert_eq!((ledger.revision(), line.status().requests), (revision, 0));
    ledger.retire("x").unwrap();
    assert_ne!(ledger.revision(), revision);
    assert!(!ledger.list()[0].is_named());
    let revision = ledger.revision();
    assert_eq!(ledger.sweep(Step(1)), [key]);
    assert_ne!(ledger.revision(), revision);
    assert_eq!(line.status().requests, 0);
}

#[test]
fn an_image_that_is_given_up_is_read_before_it_is_loaded() {
    let mut ledger = Ledger::new(1);
    let (key, slot) = hot(&mut ledger, "x");
    assert!(ledger.cool(&key).is_err(), "it is on the device");
    ledger.evict(&key, Step(0)).unwrap();
    ledger.cool(&key).unwrap();
    assert!(matches!(ledger.residency(&key), Residency::Coming));
    assert!(ledger.begin_load(&key).is_err(), "there is nothing to load");
    ledger.warm(&key).unwrap();
    assert_eq!(ledger.begin_load(&key), Ok(slot));
    assert!(ledger.warm(&key).is_err());
}
