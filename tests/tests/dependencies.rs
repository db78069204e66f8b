//! Dependencies point down: among crates, and among the modules of each.
//!
//! Cargo refuses circles of crates, and allows those of modules; and neither says which crate stands above which. The
//! sources are parsed, so that a `use` in any form counts, and a path within a macro.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit;

/// The crates, each with only those before it beneath it. docs/architecture.md draws it.
const CRATES: &[&str] = &[
    "core",
    "layout",
    "sim",
    "transfer",
    "ramdisk",
    "directive",
    "api",
    "cachefs",
    "staging",
    "fleet",
    "wlm",
    "agent",
    "scheduler",
    "cli",
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn no_crate_uses_one_above_it() {
    let crates = workspace().join("crates");
    let found: BTreeSet<String> = fs::read_dir(&crates)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, CRATES.iter().map(|name| (*name).to_owned()).collect(), "CRATES names all of them");

    for (height, name) in CRATES.iter().enumerate() {
        let manifest = fs::read_to_string(crates.join(name).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for used in
                manifest.get(section).and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::keys)
            {
                let Some(used) = used.strip_prefix("ondeck-") else { continue };
                if section == "dev-dependencies" && used == "skip" {
                    continue;
                }
                let beneath =
                    CRATES.iter().position(|other| *other == used).is_some_and(|other| other < height);
                assert!(beneath, "crates/{name} uses ondeck-{used}, which does not stand beneath it");
            }
        }
    }
}

#[test]
fn no_modules_use_each_other_in_a_circle() {
    let mut circles = Vec::new();
    for source in fs::read_dir(workspace().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("src"))
        .chain([workspace().join("bench/src"), workspace().join("tests/src")])
    {
        let modules = Modules::read(&source);
        assert!(!modules.sources.is_empty(), "nothing to read in {}", source.display());
        circles.extend(modules.circles().iter().map(|circle| circle.told(&source)));
    }
    assert!(circles.is_empty(), "modules use each other:\n{}", circles.join("\n"));
}

#[test]
fn a_circle_is_found_through_groups_reexports_and_macros() {
    let directory = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = directory.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a; mod b; mod c; mod d; #[cfg(test)] mod model; pub use b::Beta;");
    write("a.rs", "use crate::{c::{Gamma, Other}, Beta};");
    write("b.rs", "mod inner;\nfn f() { println!(\"{}\", crate::c::g()); }");
    // Parent and child may use each other; so may tests.
    write(
        "b/inner.rs",
        "use super::f; fn g(_: super::super::a::Alpha) {} #[cfg(test)] mod tests { use crate::d; }",
    );
    write("c.rs", "#[cfg(test)] use crate::a;");
    write("d.rs", "use crate::b;");
    write("model.rs", "use crate::a;");
    let told: Vec<_> =
        Modules::read(directory.path()).circles().iter().map(|circle| circle.members.join(" ")).collect();
    assert_eq!(told, ["a b"]);
}

/// The path of a module within its crate; empty is the root.
type Name = Vec<String>;

/// The modules of one crate, and what each of them uses.
#[derive(Default)]
struct Modules {
    /// All of them but those of tests.
    names: BTreeSet<Name>,
    sources: Vec<(Name, PathBuf, syn::File)>,
    /// What a module has under a name of its own by `use`: a path from the root.
    imported: BTreeMap<Name, BTreeMap<String, Name>>,
    /// What is used, by whom, and where that stands.
    uses: Vec<(Name, Name, String)>,
}

/// Modules that use each other.
struct Circle {
    parent: Name,
    members: Vec<String>,
    evidence: Vec<String>,
}

impl Circle {
    fn told(&self, source: &Path) -> String {
        let place = source.strip_prefix(workspace()).unwrap_or(source);
        let parent: String = self.parent.iter().map(|part| format!("/{part}")).collect();
        format!("{}{parent}: {}\n{}", place.display(), self.members.join(", "), self.evidence.join("\n"))
    }
}

impl Modules {
    fn read(source: &Path) -> Modules {
        let mut modules = Modules::default();
        for root in ["lib.rs", "main.rs"] {
            let path = source.join(root);
            if path.exists() {
                modules.read_file(&Vec::new(), &path, source);
            }
        }
        let sources = std::mem::take(&mut modules.sources);
        for (name, path, file) in &sources {
            Reader { modules: &mut modules, name: name.clone(), path }.visit_file(file);
        }
        modules.sources = sources;
        modules
    }

    fn read_file(&mut self, name: &Name, path: &Path, children: &Path) {
        let text = fs::read_to_string(path).unwrap();
        let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self.names.insert(name.clone());
        self.read_children(name, &file.items, children);
        self.sources.push((name.clone(), path.to_owned(), file));
    }

    fn read_children(&mut self, name: &Name, items: &[syn::Item], directory: &Path) {
        for item in items {
            let syn::Item::Mod(module) = item else { continue };
            if of_tests(&module.attrs) {
                continue;
            }
            let own = module.ident.to_string();
            let name: Name = name.iter().cloned().chain([own.clone()]).collect();
            let children = directory.join(&own);
            match &module.content {
                Some((_, items)) => {
                    self.names.insert(name.clone());
                    self.read_children(&name, items, &children);
                }
                None => {
                    let file = [directory.join(format!("{own}.rs")), children.join("mod.rs")];
                    let file = file.iter().find(|file| file.exists());
                    self.read_file(&name, file.unwrap_or_else(|| panic!("no file of {name:?}")), &children);
                }
            }
        }
    }

    /// The module that a path from the root leads into, also through what others import.
    fn module_of(&self, path: &Name) -> Name {
        let mut path = path.clone();
        // An import of a name by way of the same name would have no end.
        for _ in 0..16 {
            let deepest = (0..=path.len()).rev().find(|length| self.names.contains(&path[..*length]));
            let (module, rest) = path.split_at(deepest.unwrap_or(0));
            let import = rest
                .first()
                .and_then(|first| self.imported.get(module).and_then(|imported| imported.get(first)));
            match import {
                Some(import) => path = import.iter().chain(&rest[1..]).cloned().collect(),
                None => return module.to_vec(),
            }
        }
        panic!("imports in a circle: {path:?}");
    }

    /// The circles, each among the children of one module.
    fn circles(&self) -> Vec<Circle> {
        // By parent: who uses whom among its children.
        let mut siblings: BTreeMap<Name, BTreeMap<(String, String), BTreeSet<String>>> = BTreeMap::new();
        for (user, used, place) in &self.uses {
            let used = self.module_of(used);
            let shared = user.iter().zip(&used).take_while(|(left, right)| left == right).count();
            if let (Some(from), Some(to)) = (user.get(shared), used.get(shared)) {
                let edge = (from.clone(), to.clone());
                siblings
                    .entry(user[..shared].to_vec())
                    .or_default()
                    .entry(edge)
                    .or_default()
                    .insert(place.clone());
            }
        }
        siblings.iter().flat_map(|(parent, edges)| circles_among(parent, edges)).collect()
    }
}

fn circles_among(parent: &Name, edges: &BTreeMap<(String, String), BTreeSet<String>>) -> Vec<Circle> {
    let reached_from = |start: &String| {
        let mut reached: BTreeSet<&String> = BTreeSet::new();
        let mut left = vec![start];
        while let Some(from) = left.pop() {
            for (_, to) in edges.keys().filter(|(user, _)| user == from) {
                if reached.insert(to) {
                    left.push(to);
                }
            }
        }
        reached
    };
    let modules: BTreeSet<&String> = edges.keys().map(|(from, _)| from).collect();
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        modules.iter().map(|module| (*module, reached_from(module))).collect();
    let mut told: BTreeSet<&String> = BTreeSet::new();
    let mut circles = Vec::new();
    for module in &modules {
        if told.contains(module) || !reach[module].contains(module) {
            continue;
        }
        let members: BTreeSet<&String> = modules
            .iter()
            .copied()
            .filter(|other| reach[module].contains(other) && reach[other].contains(module))
            .collect();
        told.extend(&members);
        let evidence = edges
            .iter()
            .filter(|((from, to), _)| members.contains(from) && members.contains(to))
            .map(|((from, to), places)| {
                let places: Vec<_> = places.iter().take(4).cloned().collect();
                format!("    {from} uses {to}: {}", places.join(", "))
            })
            .collect();
        circles.push(Circle {
            parent: parent.clone(),
            members: members.into_iter().cloned().collect(),
            evidence,
        });
    }
    circles
}

fn of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string() == "test"
    })
}

/// Reads one file, with where in it it is.
struct Reader<'a> {
    modules: &'a mut Modules,
    name: Name,
    path: &'a Path,
}

impl Reader<'_> {
    /// A path from the root, if it is one within the crate.
    fn absolute(&self, parts: &[String]) -> Option<Name> {
        let mut base = match parts.first()?.as_str() {
            "crate" => Vec::new(),
            "self" => self.name.clone(),
            "super" => self.name[..self.name.len().checked_sub(1)?].to_vec(),
            own => {
                // A child, or what is imported here.
                let child: Name = self.name.iter().cloned().chain([own.to_owned()]).collect();
                let imported =
                    self.modules.imported.get(&self.name).is_some_and(|names| names.contains_key(own));
                if !self.modules.names.contains(&child) && !imported {
                    return None;
                }
                return Some(self.name.iter().cloned().chain(parts.iter().cloned()).collect());
            }
        };
        let mut rest = &parts[1..];
        while rest.first().is_some_and(|part| part == "super") {
            base.pop()?;
            rest = &rest[1..];
        }
        Some(base.into_iter().chain(rest.iter().cloned()).collect())
    }

    fn used(&mut self, parts: &[String], line: usize) {
        if let Some(used) = self.absolute(parts) {
            let file = self.path.strip_prefix(workspace()).unwrap_or(self.path);
            self.modules.uses.push((self.name.clone(), used, format!("{}:{line}", file.display())));
        }
    }

    fn import(&mut self, tree: &syn::UseTree, before: &[String], line: usize) {
        let with = |ident: &syn::Ident| before.iter().cloned().chain([ident.to_string()]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(path) => self.import(&path.tree, &with(&path.ident), line),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree, before, line)),
            syn::UseTree::Name(name) if name.ident == "self" => {
                let own = before.last().cloned().unwrap_or_default();
                self.imported_as(own, before, line);
            }
            syn::UseTree::Name(name) => self.imported_as(name.ident.to_string(), &with(&name.ident), line),
            syn::UseTree::Rename(name) => self.imported_as(name.rename.to_string(), &with(&name.ident), line),
            syn::UseTree::Glob(_) => self.used(before, line),
        }
    }

    fn imported_as(&mut self, name: String, parts: &[String], line: usize) {
        self.used(parts, line);
        if let Some(path) = self.absolute(parts)
            // `use child;` would lead to itself.
            && path != self.name.iter().cloned().chain([name.clone()]).collect::<Name>()
        {
            self.modules.imported.entry(self.name.clone()).or_default().insert(name, path);
        }
    }

    fn tokens(&mut self, tokens: TokenStream) {
        let mut parts: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match &token {
                TokenTree::Ident(ident) if parts.is_empty() || colons == 2 => {
                    line = ident.span().start().line;
                    parts.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !parts.is_empty() => {
                    colons += 1;
                    continue;
                }
                _ => {}
            }
            self.end_of_path(&mut parts, line);
            colons = 0;
            match token {
                TokenTree::Ident(ident) => {
                    line = ident.span().start().line;
                    parts.push(ident.to_string());
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => {}
            }
        }
        self.end_of_path(&mut parts, line);
    }

    fn end_of_path(&mut self, parts: &mut Vec<String>, line: usize) {
        if parts.len() > 1 {
            self.used(parts, line);
        }
        parts.clear();
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if of_tests(&module.attrs) || module.content.is_none() {
            return;
        }
        self.name.push(module.ident.to_string());
        syn::visit::visit_item_mod(self, module);
        self.name.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !of_tests(&item.attrs) && item.leading_colon.is_none() {
            self.import(&item.tree, &[], item.use_token.span.start().line);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !of_tests(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !of_tests(&item.attrs) {
            syn::visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !of_tests(&item.attrs) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if path.leading_colon.is_none() && parts.len() > 1 {
            let line = path.segments.first().map_or(0, |first| first.ident.span().start().line);
            self.used(&parts, line);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
    }
}
