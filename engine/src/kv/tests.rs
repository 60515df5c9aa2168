//! Blocks and the prefix cache, rule by rule and against a model of what every block holds.

use std::collections::HashMap;

use super::*;
use crate::testing::Rng;

const BASE: Generation = Generation(None);

fn want(tokens: &[u32]) -> Admission<'_> {
    Admission { generation: BASE, tokens, skippable: tokens.len() - 1, spare: 0 }
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).collect()
}

/// Admits, computes and ends a sequence.
fn run(kv: &mut KvBlocks, want: Admission<'_>) -> usize {
    let (mut table, computed) = kv.admit(want).unwrap();
    kv.note(&mut table, want.generation, want.tokens);
    kv.release(table);
    computed
}

#[test]
fn blocks_are_taken_as_the_sequence_grows() {
    let mut kv = KvBlocks::new(4, 16, PrefixCaching::Off);
    let (mut table, _) = kv.admit(want(&tokens(16))).unwrap();
    assert_eq!(kv.used(), 1);
    assert!(kv.grow(&mut table, 17) && kv.grow(&mut table, 32));
    assert_eq!((kv.used(), table.blocks().len()), (2, 2));
    assert!(!kv.grow(&mut table, 65), "there are four");
    kv.release(table);
    assert_eq!((kv.used(), kv.available()), (0, 4));
}

#[test]
fn room_for_others_is_left() {
    let mut kv = KvBlocks::new(4, 16, PrefixCaching::On);
    let prompt = tokens(33);
    assert!(kv.admit(Admission { spare: 2, ..want(&prompt) }).is_none());
    let (table, _) = kv.admit(Admission { spare: 1, ..want(&prompt) }).unwrap();
    assert_eq!(kv.used(), 3);
    kv.release(table);
}

#[test]
fn a_prefix_is_found_again_and_one_token_is_left_to_compute() {
    let mut kv = KvBlocks::new(8, 4, PrefixCaching::On);
    let prompt = tokens(8);
    assert_eq!(run(&mut kv, want(&prompt)), 0);
    assert_eq!((kv.used(), kv.cached()), (0, 2));
    assert_eq!(run(&mut kv, want(&prompt)), 4, "the last token must be computed");
    let longer = tokens(11);
    assert_eq!(run(&mut kv, want(&longer)), 8);
    let mut other = tokens(11);
    other[5] = 99;
    assert_eq!(run(&mut kv, want(&other)), 4, "from the first other token on all is computed");
    assert_eq!(run(&mut kv, Admission { skippable: 3, ..want(&longer) }), 0);
    let report = kv.prefix_report();
    assert_eq!((report.queried_tokens, report.hit_tokens), (8 + 8 + 11 + 11 + 11, 4 + 8 + 4));
}

#[test]
fn a_block_is_found_behind_the_same_tokens_only() {
    let mut kv = KvBlocks::new(8, 2, PrefixCaching::On);
    run(&mut kv, want(&[1, 2, 3, 4, 5]));
    assert_eq!(run(&mut kv, want(&[9, 9, 3, 4, 5])), 0);
    assert_eq!(run(&mut kv, want(&[3, 4, 5])), 0);
}

#[test]
fn generations_do_not_see_each_other_and_are_forgotten_alone() {
    let mut kv = KvBlocks::new(8, 4, PrefixCaching::On);
    let prompt = tokens(9);
    for generation in [BASE, Generation(Some(1)), Generation(Some(2))] {
        assert_eq!(run(&mut kv, Admission { generation, ..want(&prompt) }), 0);
    }
    kv.forget(Generation(Some(1)));
    assert_eq!(kv.cached(), 4);
    assert_eq!(run(&mut kv, want(&prompt)), 8);
    assert_eq!(run(&mut kv, Admission { generation: Generation(Some(1)), ..want(&prompt) }), 0);
    assert_eq!(run(&mut kv, Admission { generation: Generation(Some(2)), ..want(&prompt) }), 8);
}

#[test]
fn the_least_recently_released_goes_first_and_ends_go_before_beginnings() {
    let mut kv = KvBlocks::new(4, 4, PrefixCaching::On);
    let (first, second) = (tokens(8), vec![50; 8]);
    run(&mut kv, want(&first));
    run(&mut kv, want(&second));
    let (table, _) = kv.admit(want(&[7, 7])).unwrap();
    assert_eq!(kv.prefix_report().evicted_blocks, 1);
    // The end of the first is gone, its beginning is not.
    assert_eq!(run(&mut kv, want(&[0, 1, 2, 3, 4])), 4);
    assert_eq!(run(&mut kv, want(&[50; 6])), 4);
    kv.release(table);
}

#[test]
fn what_followed_an_evicted_block_is_out_of_reach() {
    let mut kv = KvBlocks::new(3, 2, PrefixCaching::On);
    let prompt = tokens(5);
    // Two compute the same at once: the second's blocks are its own, the first's are the known ones.
    let (mut a, _) = kv.admit(want(&prompt[..3])).unwrap();
    kv.note(&mut a, BASE, &prompt[..2]);
    kv.release(a);
    let (mut b, computed) = kv.admit(want(&prompt)).unwrap();
    assert_eq!(computed, 2);
    kv.note(&mut b, BASE, &prompt[..4]);
    kv.release(b);
    assert_eq!(kv.cached(), 2);
    let (c, _) = kv.admit(want(&[9; 5])).unwrap();
    kv.release(c);
    assert_eq!(run(&mut kv, want(&prompt)), 0);
}

#[test]
fn sharers_keep_a_block_until_the_last_of_them_lets_go() {
    let mut kv = KvBlocks::new(4, 4, PrefixCaching::Off);
    let (parent, _) = kv.admit(want(&tokens(10))).unwrap();
    let child = kv.share(&parent, 8);
    assert_eq!(child.blocks(), &parent.blocks()[..2]);
    kv.release(parent);
    assert_eq!(kv.used(), 2);
    kv.release(child);
    assert_eq!(kv.used(), 0);
}

#[test]
fn a_fork_copies_the_block_that_is_partly_filled() {
    let mut kv = KvBlocks::new(5, 4, PrefixCaching::Off);
    let (parent, _) = kv.admit(want(&tokens(10))).unwrap();
    let mut child = kv.share(&parent, 9);
    assert_eq!(child.blocks(), parent.blocks());
    assert!(kv.own(&mut child, (9, 10), 2).is_err(), "two are free, and two are to be left");
    let copy = kv.own(&mut child, (9, 10), 1).unwrap().expect("a block is partly filled");
    assert_eq!(child.blocks()[..2], parent.blocks()[..2]);
    let (from, to) = (parent.blocks()[2], child.blocks()[2]);
    assert_eq!(copy.blocks(), BlockCopy { from, to });
    assert!(from != to);
    kv.release(parent);
    assert_eq!(kv.used(), 4, "what the copy reads is kept");
    kv.copied(copy);
    assert_eq!(kv.used(), 3);
    kv.release(child);

    let (parent, _) = kv.admit(want(&tokens(9))).unwrap();
    let mut child = kv.share(&parent, 8);
    assert!(kv.own(&mut child, (8, 9), 0).unwrap().is_none(), "full blocks need no copy");
    assert_eq!(child.blocks().len(), 3);
    kv.release(parent);
    kv.release(child);
    assert_eq!(kv.used(), 0);
}

/// A model of the device: what was written into each position of each block. Whatever is admitted from
/// the cache must hold exactly the tokens asked for under the generation asked for.
#[test]
fn random_use_finds_what_it_asks_for_and_loses_no_block() {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let blocks = 6 + rng.below(30);
        let mut kv = KvBlocks::new(blocks, 2, PrefixCaching::On);
        let mut device: HashMap<(u32, usize), (Generation, Vec<u32>)> = HashMap::new();
        let mut live: Vec<(BlockTable, Generation, Vec<u32>)> = Vec::new();
        for _ in 0..1500 {
            match rng.below(6) {
                0 | 1 => {
                    let generation = Generation([None, Some(1), Some(2)][rng.below(3)]);
                    let tokens: Vec<u32> =
                        (0..1 + rng.below(12)).map(|_| rng.below(2) as u32).collect();
                    let skippable = tokens.len() - 1;
                    let want = Admission { generation, tokens: &tokens, skippable, spare: 0 };
                    let Some((table, computed)) = kv.admit(want) else { continue };
                    assert!(computed < tokens.len() && computed % 2 == 0);
                    for position in 0..computed {
                        let block = table.blocks()[position / 2];
                        let (by, of) = &device[&(block, position % 2)];
                        assert_eq!((*by, &of[..]), (generation, &tokens[..=position]));
                    }
                    write(&mut device, &table, computed, (generation, &tokens));
                    live.push((table, generation, tokens));
                }
                2 if !live.is_empty() => {
                    let index = rng.below(live.len());
                    let (table, generation, tokens) = &mut live[index];
                    let from = tokens.len();
                    tokens.push(rng.below(2) as u32);
                    match kv.grow(table, tokens.len()) {
                        true => write(&mut device, table, from, (*generation, tokens)),
                        false => drop(tokens.pop()),
                    }
                }
                3 if !live.is_empty() => {
                    let index = rng.below(live.len());
                    let (table, generation, tokens) = &mut live[index];
                    kv.note(table, *generation, tokens);
                }
                4 if !live.is_empty() => {
                    let (parent, generation, tokens) = &live[rng.below(live.len())];
                    let kept = tokens.len() / 2 * 2;
                    let shared = kv.share(parent, kept);
                    assert_eq!(shared.blocks().len() * 2, kept);
                    let copy = (*generation, tokens[..kept].to_vec());
                    live.push((shared, copy.0, copy.1));
                }
                5 if !live.is_empty() => {
                    let (table, _, _) = live.swap_remove(rng.below(live.len()));
                    kv.release(table);
                }
                _ => kv.forget(Generation(Some(1 + rng.below(2) as u64))),
            }
            let mut held = vec![0; blocks];
            live.iter()
                .flat_map(|(table, _, _)| table.blocks())
                .for_each(|&block| held[block as usize] += 1);
            assert_eq!(held, kv.references);
            assert_eq!(held.iter().filter(|&&count| count > 0).count(), kv.used());
        }
        live.into_iter().for_each(|(table, _, _)| kv.release(table));
        assert_eq!((kv.used(), kv.available()), (0, blocks));
    }
}

fn write(
    device: &mut HashMap<(u32, usize), (Generation, Vec<u32>)>,
    table: &BlockTable,
    from: usize,
    (generation, tokens): (Generation, &[u32]),
) {
    for position in from..tokens.len() {
        let block = table.blocks()[position / 2];
        device.insert((block, position % 2), (generation, tokens[..=position].to_vec()));
    }
}
