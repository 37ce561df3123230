//! Which prompts one of several strands has.

use crate::workload::Length;
use std::collections::BTreeMap;

/// Prompts in a row that make neighbours of those that begin alike.
const NEIGHBOURS: usize = 4;

/// Prompts that begin alike, or choices of one request, in positions.
struct Group {
    prompts: usize,
    /// What they have in common.
    common: usize,
    /// What they need beside that, all together.
    own: usize,
    /// Stretches in which they stand one after the other.
    stretches: usize,
}

impl Group {
    /// Whether they come together: the dispatcher seats a prompt where its beginning is, until that lane is fuller by twice
    /// as much as it saves. A lane that comes home also takes neighbours, unless these are most of the job.
    fn stays(&self, all: usize, strands: usize) -> bool {
        let are_neighbours = self.prompts >= NEIGHBOURS * self.stretches;
        let are_few = 2 * strands * self.prompts <= all;
        self.prompts == 1 || self.own <= 2 * self.common || are_neighbours && are_few
    }
}

/// The prompts of one of so many strands.
pub(super) fn strand_share(lengths: &[Length], strands: usize) -> Vec<Length> {
    let (mut groups, mut group_of) = (Vec::<Group>::new(), Vec::new());
    let mut texts = BTreeMap::new();
    for &Length { prompt, output, common } in lengths {
        let group = match group_of.last() {
            Some(&before) if common.again => before,
            _ if common.tokens > 0 => *texts.entry(common.text).or_insert(groups.len()),
            _ => groups.len(),
        };
        if group == groups.len() {
            let common = if common.tokens > 0 { common.tokens } else { prompt };
            groups.push(Group { prompts: 0, common, own: 0, stretches: 0 });
        }
        let found = &mut groups[group];
        let input = if common.again { 1 } else { prompt.saturating_sub(found.common) };
        found.prompts += 1;
        found.own += input + output;
        found.stretches += usize::from(group_of.last() != Some(&group));
        group_of.push(group);
    }
    // Take a different one of every few each time, because lengths may alternate.
    let mine = |turn: usize| (turn + turn / strands).is_multiple_of(strands);
    let mut apart = 0..;
    let share = lengths.iter().zip(group_of).filter(|(_, group)| {
        match groups[*group].stays(lengths.len(), strands) {
            true => mine(*group),
            false => apart.next().is_some_and(mine),
        }
    });
    share.map(|(length, _)| *length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Common;

    /// How many prompts of each text the first of two strands has.
    fn check(lengths: &[Length], expected: &[(u64, usize)]) {
        let mut texts = BTreeMap::new();
        for length in strand_share(lengths, 2) {
            *texts.entry(length.common.text).or_insert(0) += 1;
        }
        assert_eq!(texts.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn prompts_that_save_much_together_come_together() {
        let alike = |tokens: usize, text: u64, count: usize| {
            let common = Common { tokens, text, again: false };
            vec![Length { prompt: 500, output: 10, common }; count]
        };
        check(&alike(0, 0, 20), &[(0, 10)]);
        // Ten need 200 positions beside 490 that they share; forty need 800 beside 490, or 1,000 beside 10.
        let few = [alike(490, 1, 10), alike(490, 2, 10), alike(490, 3, 10), alike(490, 4, 10)];
        check(&few.concat(), &[(1, 10), (4, 10)]);
        // Each of forty needs more than it saves, so they come together only if they are neighbours.
        let many = [1, 2, 3, 4].map(|text| alike(100, text, 40));
        check(&many.concat(), &[(1, 40), (4, 40)]);
        let in_turns: Vec<Length> =
            (0..40).flat_map(|index| many[..3].iter().map(move |text| text[index])).collect();
        check(&in_turns, &[(1, 20), (2, 20), (3, 20)]);
        check(&alike(490, 1, 100), &[(1, 50)]);
        check(&alike(480, 1, 40), &[(1, 20)]);
        let choice = |output: usize, again: bool| Length {
            prompt: 500,
            output,
            common: Common { again, ..Common::default() },
        };
        let choices = |output: usize| [false, true, true, true].map(|again| choice(output, again));
        check(&[choices(200), choices(200)].concat(), &[(0, 4)]);
        check(&choices(400), &[(0, 2)]);
    }
}
