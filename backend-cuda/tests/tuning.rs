//! Properties of the parser of tuning data: what is written is read again, and whatever is read is
//! taken whole or refused with the name of a field.
#![allow(clippy::unwrap_used)]

use amphora_backend_cuda::tuning::operators::{
    AttentionPath, AttentionUse, DeltaUse, Deltas, DensePath, DenseUse, ExpertsPath, ExpertsUse,
    Order, RoutePath, RouteUse,
};
use amphora_backend_cuda::tuning::{
    AnyFile, Element, Entry, File, Limits, Made, Measured, Operator, ShrinkUse, When, vllm,
};

const H200: Limits = Limits { processors: 132, shared: 227 << 10, overlap: true, groups: true };

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn maybe<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let some = self.below(2) == 0;
        some.then(|| self.pick(of))
    }
}

fn dtype(rng: &mut Rng) -> Option<Element> {
    rng.maybe(&[Element::F32, Element::F16, Element::Bf16])
}

/// A file of sound entries for different calls.
fn file<U>(rng: &mut Rng, operator: &str, entry: impl Fn(&mut Rng) -> (When, U)) -> File<U> {
    let mut entries: Vec<Entry<U>> = Vec::new();
    for _ in 0..rng.below(6) {
        let (when, choice) = entry(rng);
        if entries.iter().all(|other| other.when != when) {
            let measured = rng.maybe(&[Measured { microseconds: 1.25, heuristic: 3.0 }]);
            let choice = if rng.below(5) > 0 { Some(choice) } else { None };
            entries.push(Entry { when, choice, measured });
        }
    }
    let made = Made { date: "2026-11-30".into(), driver: "580".into(), command: "a \"b\"".into() };
    let made = if rng.below(2) == 0 { Some(made) } else { None };
    File { gpu: "NVIDIA H200".to_owned(), operator: operator.to_owned(), made, entries }
}

fn any_file(rng: &mut Rng) -> AnyFile {
    let product = |rng: &mut Rng| When {
        tokens: rng.maybe(&[1, 8, 16]),
        k: rng.maybe(&[64, 2880]),
        n: rng.maybe(&[64, 5120]),
        dtype: dtype(rng),
        ..When::default()
    };
    let layer = |rng: &mut Rng| When {
        tokens: rng.maybe(&[1, 8, 16]),
        experts: rng.maybe(&[32, 128]),
        top_k: rng.maybe(&[1, 4]),
        ..When::default()
    };
    match rng.below(5) {
        0 => AnyFile::Linear(file(rng, "linear", |rng| {
            let path = rng.pick(&[
                DensePath::Stream,
                DensePath::Cluster,
                DensePath::Narrow,
                DensePath::Wide,
                DensePath::Warpgroups,
                DensePath::Library,
            ]);
            let tiles = matches!(path, DensePath::Narrow | DensePath::Wide);
            let parts = match path {
                DensePath::Stream | DensePath::Warpgroups | DensePath::Library => None,
                DensePath::Cluster => Some(rng.pick(&[3, 7])),
                DensePath::Narrow | DensePath::Wide => rng.maybe(&[1, 3, 7]),
            };
            let of = |value: Option<usize>| if tiles { value } else { None };
            let group = of(rng.maybe(&[1, 2, 64]));
            let deltas = if tiles { rng.maybe(&[Deltas::Inside, Deltas::Apart]) } else { None };
            let apart = deltas == Some(Deltas::Apart);
            let order = if apart { rng.maybe(&[Order::Ordered, Order::Atomic]) } else { None };
            let even_k = if tiles { rng.maybe(&[false, true]) } else { None };
            (product(rng), DenseUse { path, parts, order, group, even_k, deltas })
        })),
        1 => AnyFile::LoraLinear(file(rng, "lora_linear", |rng| {
            (
                product(rng),
                DeltaUse { rank_rows: rng.pick(&[8, 32]), rank_parts: 1 + rng.below(32) },
            )
        })),
        2 => AnyFile::MoeRoute(file(rng, "moe_route", |rng| {
            let path = rng.pick(&[RoutePath::Few, RoutePath::Sort, RoutePath::Choose]);
            let blocks = if path == RoutePath::Few { None } else { rng.maybe(&[1, 16]) };
            (layer(rng), RouteUse { path, blocks })
        })),
        3 => AnyFile::FusedMoe(file(rng, "fused_moe", |rng| {
            let path =
                rng.pick(&[ExpertsPath::Stream, ExpertsPath::Warpgroups, ExpertsPath::Warps]);
            let stream = path == ExpertsPath::Stream;
            let when = When { k: rng.maybe(&[2880]), inner: rng.maybe(&[768]), ..layer(rng) };
            let of = |value: Option<usize>| if stream { value } else { None };
            // A pass of eight is for eight tokens at most.
            let few = when.tokens.is_none_or(|tokens| tokens <= 8);
            let passes: &[usize] = if few { &[8, 16] } else { &[16] };
            let choice = ExpertsUse {
                pass: of(rng.maybe(passes)),
                gate_up_pieces: of(rng.maybe(&[5])),
                down_pieces: of(rng.maybe(&[2, 3, 4])),
                ..ExpertsUse::new(path)
            };
            (when, choice)
        })),
        _ => AnyFile::PagedAttention(file(rng, "paged_attention", |rng| {
            let path =
                rng.pick(&[AttentionPath::Split, AttentionPath::Warpgroups, AttentionPath::Flash]);
            let splits = if path == AttentionPath::Split { rng.maybe(&[1, 16]) } else { None };
            let when =
                When { heads: rng.maybe(&[64]), head_dim: rng.maybe(&[64]), ..When::default() };
            (When { tokens: rng.maybe(&[1, 4096]), ..when }, AttentionUse { path, splits })
        })),
    }
}

#[test]
fn what_is_written_is_read_again() {
    for seed in 0..500 {
        let file = any_file(&mut Rng(seed));
        let read = AnyFile::parse(&file.text()).unwrap_or_else(|f| panic!("{f}: {}", file.text()));
        assert_eq!(read, file);
        assert_eq!(read.check_on(H200), Ok(()), "{}", file.text());
    }
}

/// Pieces of other files, and bytes of none.
#[test]
fn what_is_no_file_is_refused_by_a_field() {
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..2000 {
        let mut rng = Rng(seed);
        let mut text = any_file(&mut rng).text().into_bytes();
        for _ in 0..1 + rng.below(3) {
            let (from, to) = (rng.below(text.len()), rng.below(text.len()));
            match rng.below(3) {
                0 => text[to] = rng.pick(b"0123456789\"{}[],:-.etruflsn "),
                1 => text[to] = text[from],
                _ => {
                    let (from, to) = (from.min(to), from.max(to));
                    text.drain(from..to.min(from + 9));
                }
            }
        }
        let text = String::from_utf8(text).unwrap();
        match AnyFile::parse(&text) {
            Ok(file) => {
                taken += 1;
                assert_eq!(AnyFile::parse(&file.text()).as_ref(), Ok(&file), "{text}");
                // Whatever it asks for, the answer is one of the two.
                let _ = file.check_on(Limits { shared: 99 << 10, overlap: false, ..H200 });
            }
            Err(fault) => {
                refused += 1;
                assert!(!fault.field.is_empty() && !fault.to_string().contains('\n'), "{fault}");
            }
        }
    }
    assert!(taken > 50 && refused > 500, "{taken} taken, {refused} refused");
}

#[test]
fn a_smaller_device_refuses_what_it_has_no_room_for() {
    let text = |path: &str| {
        format!(
            r#"{{"gpu": "a", "operator": "fused_moe", "entries": [{{"when": {{"tokens": 1}}, "use": {{"path": "{path}"}}}}]}}"#
        )
    };
    let small = Limits { shared: 99 << 10, overlap: false, groups: false, ..H200 };
    for (path, fits) in [("stream", false), ("warpgroups", false), ("warps", true)] {
        let file = AnyFile::parse(&text(path)).unwrap();
        let checked = file.check_on(small);
        assert_eq!(checked.is_ok(), fits, "{path}");
        if let Err(fault) = checked {
            assert_eq!(fault.field, "entries[0].use.path");
        }
    }
}

#[test]
fn another_program_s_file_never_panics() {
    let sound = r#"{"9": {"1": {"16": {"2880": {"32": {"block_m": 16}}}}}}"#;
    for seed in 0..500 {
        let mut rng = Rng(seed);
        let mut text = sound.as_bytes().to_vec();
        let at = rng.below(text.len());
        text[at] = rng.pick(b"0123456789\"{}[],:- ");
        let text = String::from_utf8(text).unwrap();
        if let Err(fault) = vllm::answer(vllm::Kind::Shrink, "g", &text) {
            assert!(!fault.field.is_empty(), "{text}");
        }
    }
}

/// A choice may be left to the heuristic, but that must be said.
#[test]
fn a_choice_is_null_or_something_and_never_missing() {
    let text = |more: &str| {
        format!(
            r#"{{"gpu": "a", "operator": "linear", "entries": [{{"when": {{"tokens": 1}}{more}}}]}}"#
        )
    };
    let AnyFile::Linear(file) = AnyFile::parse(&text(r#", "use": null"#)).unwrap() else {
        panic!("another operator")
    };
    assert_eq!(file.entries[0].choice, None);
    let fault = AnyFile::parse(&text("")).unwrap_err();
    assert!(fault.to_string().contains("use"), "{fault}");
}

/// What a search tries is what a file may say.
#[test]
fn every_candidate_is_sound_in_a_file() {
    fn all<U: Operator>(when: When) -> usize {
        let possible = U::possible(&when, H200);
        for choice in &possible {
            let entries = vec![Entry { when, choice: Some(choice.clone()), measured: None }];
            let (gpu, operator) = ("a GPU".to_owned(), U::NAME.to_owned());
            let file = U::any(File { gpu, operator, made: None, entries });
            assert_eq!(AnyFile::parse(&file.text()), Ok(file), "{choice:?}");
        }
        possible.len()
    }
    let dense = When { tokens: Some(8), k: Some(2880), n: Some(5120), ..When::default() };
    // 17 rows do not go to the stream, and 2888 inputs are no whole steps.
    assert_eq!(all::<DenseUse>(dense), 3 + 8 + 2 * 12);
    assert_eq!(all::<DenseUse>(When { tokens: Some(17), ..dense }), 2 + 8 + 2 * 12);
    assert_eq!(all::<DenseUse>(When { k: Some(2888), ..dense }), 3 + 8 + 2 * 11);
    assert_eq!(all::<DeltaUse>(dense), 8);
    let layer = When { tokens: Some(8), experts: Some(128), top_k: Some(8), ..When::default() };
    assert_eq!(all::<RouteUse>(layer), 9);
    let layer = When { k: Some(2048), inner: Some(768), ..layer };
    assert_eq!(all::<ExpertsUse>(layer), 2 * (1 + 2 + 4) + 1 + 8);
    assert_eq!(all::<ExpertsUse>(When { tokens: Some(65), ..layer }), 1 + 8);
    assert_eq!(all::<ExpertsUse>(When { inner: Some(776), tokens: Some(65), ..layer }), 1 + 4);
    assert_eq!(all::<ShrinkUse>(When { k: Some(64), ..When::default() }), 2);
    assert_eq!(all::<AttentionUse>(When { heads: Some(64), ..When::default() }), 7);
}

#[test]
fn a_newer_file_replaces_what_is_for_the_same_calls() {
    let file = |tokens: &[usize], parts| {
        let entry = |&tokens: &usize| Entry {
            when: When { tokens: Some(tokens), ..When::default() },
            choice: Some(DenseUse { parts: Some(parts), ..DenseUse::new(DensePath::Wide) }),
            measured: None,
        };
        let entries = tokens.iter().map(entry).collect();
        let (gpu, operator) = ("a GPU".to_owned(), "linear".to_owned());
        AnyFile::Linear(File { gpu, operator, made: None, entries })
    };
    let mut all = file(&[1, 8], 1);
    all.absorb(file(&[4, 8], 2)).unwrap();
    let AnyFile::Linear(all) = all else { panic!("it stays what it is") };
    let found: Vec<_> =
        all.entries.iter().map(|e| (e.when.tokens, e.choice.and_then(|c| c.parts))).collect();
    assert_eq!(found, [(Some(1), Some(1)), (Some(4), Some(2)), (Some(8), Some(2))]);
    let other = AnyFile::parse(r#"{"gpu": "a GPU", "operator": "moe_route", "entries": []}"#);
    assert!(file(&[1], 1).absorb(other.unwrap()).is_err());
}

/// Found by fuzzing: a key without a name is no name of a field.
#[test]
fn a_fault_at_a_nameless_key_is_the_file_s() {
    let fault = AnyFile::parse(r#"{""::{":162""#).unwrap_err();
    assert_eq!(fault.field, "file", "{fault}");
}

/// Numbers that are none, nothing, below it or beyond all machines, in each place of a call or a choice.
#[test]
fn absurd_numbers_are_refused_where_they_stand() {
    let absurd =
        ["0", "-1", "1e99", "2.5", "18446744073709551616", "4294967296", "\"8\"", "[8]", "{}"];
    let mut places = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let file = any_file(&mut Rng(seed));
        let sound: serde_json::Value = serde_json::from_str(&file.text()).unwrap();
        let entries = sound["entries"].as_array().unwrap().len();
        for (entry, part) in (0..entries).flat_map(|entry| [(entry, "when"), (entry, "use")]) {
            let Some(fields) = sound["entries"][entry][part].as_object() else { continue };
            for field in fields.iter().filter(|(_, value)| value.is_u64()).map(|(name, _)| name) {
                places.insert(format!("{} {part} {field}", file.operator()));
                for number in absurd {
                    let mut value = sound.clone();
                    value["entries"][entry][part][field] = serde_json::json!("here");
                    let text = value.to_string().replacen("\"here\"", number, 1);
                    let fault = AnyFile::parse(&text).expect_err(&text);
                    let at = format!("entries[{entry}].{part}.{field}");
                    assert_eq!(fault.field, at, "{number}: {fault}");
                }
                // The largest that a call may name: whatever the choice, it is an answer.
                let mut value = sound.clone();
                value["entries"][entry][part][field] = serde_json::json!(u32::MAX);
                if let Ok(file) = AnyFile::parse(&value.to_string()) {
                    assert_eq!(part, "when", "{value}");
                    let _ = (file.check_on(H200), file.check_on(Limits { shared: 0, ..H200 }));
                }
            }
        }
    }
    assert!(places.len() >= 26, "{places:?}");
}
