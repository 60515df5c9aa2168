//! The report as lines for people.

use super::report::{AdapterReport, ByDtype, Fault, ModelReport, Report, Verdict};
use crate::console::grouped;

/// The whole report. Names from files are shown without what a terminal would act on.
pub fn lines(report: &Report) -> Vec<String> {
    let lines = match report {
        Report::Model(report) => model(report),
        Report::Adapter(report) => adapter(report),
    };
    lines.iter().map(|line| visible(line)).collect()
}

/// Control characters in their escaped form.
fn visible(line: &str) -> String {
    line.chars()
        .flat_map(|c| {
            let (seen, hidden) = match c.is_control() {
                false => (Some(c), None),
                true => (None, Some(c.escape_default())),
            };
            seen.into_iter().chain(hidden.into_iter().flatten())
        })
        .collect()
}

fn reasons(lines: &mut Vec<String>, faults: &[Fault]) {
    for fault in faults {
        let more = match (fault.category, fault.count) {
            // The message of an adapter's reason has the number already.
            (None, count) if count > 1 => format!(" (and {} more like it)", count - 1),
            _ => String::new(),
        };
        lines.push(format!("  refused    {}{more}", fault.message));
    }
}

fn both(bytes: ByDtype) -> String {
    format!("{} bytes in f32, {} in bf16", grouped(bytes.f32), grouped(bytes.bf16))
}

fn counted<'a>(counts: impl IntoIterator<Item = (&'a String, &'a usize)>, unit: &str) -> String {
    let each = counts.into_iter().map(|(name, n)| format!("{name} {}{unit}", grouped(*n)));
    each.collect::<Vec<_>>().join(", ")
}

fn model(report: &ModelReport) -> Vec<String> {
    let verdict = match report.verdict {
        Verdict::Refused => "refused",
        Verdict::Accepted | Verdict::Open => "accepted",
    };
    let mut lines = vec![format!(
        "model {}: {verdict}, backend {} in {}",
        report.folder, report.backend, report.dtype
    )];
    reasons(&mut lines, &report.reasons);
    if let Some(config) = &report.config {
        lines.push(format!(
            "  family     {}: {} layers ({} with experts), hidden {}, {} query and {} key heads of {}",
            config.architecture,
            config.layers,
            config.expert_layers,
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim
        ));
        if config.expert_layers > 0 {
            lines.push(format!(
                "  experts    {} a layer, {} a token, inner width {}",
                config.experts, config.experts_per_token, config.expert_intermediate
            ));
        }
        if config.expert_layers < config.layers {
            lines.push(format!("  dense      inner width {}", config.dense_intermediate));
        }
        let tied = if config.tied_embeddings { ", head tied to the embedding" } else { "" };
        lines.push(format!(
            "  tokens     vocabulary {}, {} positions{tied}",
            grouped(config.vocab),
            grouped(config.max_positions)
        ));
    }
    if let Some(files) = &report.files {
        lines.push(format!(
            "  files      {} shards, {} tensors, {} parameters, {} bytes: {}",
            files.shards,
            files.tensors,
            grouped(files.parameters),
            grouped(files.bytes),
            counted(&files.dtypes, "")
        ));
    }
    if let Some(memory) = &report.memory {
        lines.push(format!("  weights    {}", both(memory.weights)));
        lines.push(format!("  cache      {} for 1,000 tokens", both(memory.kv_per_1000_tokens)));
        lines.push(format!("  step       {}, at the default settings", both(memory.step)));
        lines.push(format!(
            "  adapters   {} bytes of table at the default settings, beside their memory",
            grouped(memory.adapter_table)
        ));
    }
    lines
}

fn adapter(report: &AdapterReport) -> Vec<String> {
    let against = match (&report.model, report.verdict) {
        (Some(model), Verdict::Refused) => format!("refused by {model}"),
        (Some(model), _) => format!("accepted by {model}"),
        (None, Verdict::Refused) => "refused by every model".to_owned(),
        (None, _) => {
            "nothing speaks against it; --model DIR says whether a model takes it".to_owned()
        }
    };
    let mut lines = vec![format!("adapter {}: {against}", report.folder)];
    reasons(&mut lines, &report.reasons);
    let says = &report.says;
    let number = |found: Option<String>| found.unwrap_or_else(|| "?".to_owned());
    lines.push(format!(
        "  says       r {}, alpha {}{}, PEFT {}, base {}",
        number(says.rank.map(|r| r.to_string())),
        number(says.alpha.map(|a| a.to_string())),
        if says.use_rslora { ", rsLoRA" } else { "" },
        says.peft_version.as_deref().unwrap_or("?"),
        says.base_model.as_deref().unwrap_or("?")
    ));
    if !says.target_parameters.is_empty() {
        lines.push(format!("  parameters {}", says.target_parameters.join(", ")));
    }
    let file = &report.file;
    lines.push(format!(
        "  file       {} bytes, {} tensors: {}",
        grouped(file.bytes),
        file.tensors,
        counted(&file.dtypes, "")
    ));
    for module in &file.modules {
        let shapes = |shapes: &[Vec<usize>]| {
            shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" ")
        };
        lines.push(format!(
            "    {:<28} {} pairs in {} layers, A {}, B {}",
            module.name,
            module.pairs,
            module.layers,
            shapes(&module.lora_a),
            shapes(&module.lora_b)
        ));
    }
    let Some(applied) = &report.applied else {
        return lines;
    };
    lines.extend(applied.layout.iter().map(|layout| format!("  layout     {layout}")));
    lines.extend(applied.notes.iter().map(|note| format!("  note       {note}")));
    lines.push(format!("  applied    to {}", applied.architecture));
    for module in &applied.modules {
        lines.push(format!(
            "    {:<8} {} factors in {} layers, rank {}, stored at {}, scale {}",
            module.projection,
            module.factors,
            module.layers,
            range(module.rank),
            range(module.rank_class),
            range(module.scale)
        ));
    }
    lines.push(format!("  host       {}", both(applied.memory.host)));
    lines.push(format!("  device     {}", both(applied.memory.device)));
    lines
}

fn range<T: PartialEq + std::fmt::Display>((least, most): (T, T)) -> String {
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_act_on_is_escaped() {
        assert_eq!(visible("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(range((1, 1)), "1");
        assert_eq!(range((1, 8)), "1 to 8");
    }
}
