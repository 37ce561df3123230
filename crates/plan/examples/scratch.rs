fn main() {
    glinthawk_plan::reproduce::scratch();
}
